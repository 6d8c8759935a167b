package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-server/volume"
)

// The control API's part about volumes. docs/operations.md, "Volumes".

// poolByName returns a pool. The error is ENODEV if there is none.
func (s *Server) poolByName(name string) (*volume.Pool, error) {
	for _, p := range s.jail.pools {
		if p.Config().Name == name {
			return p, nil
		}
	}
	return nil, fmt.Errorf("there is no pool %q in the configuration of the server: %w", name, syscall.ENODEV)
}

// ListPools lists the pools. One that cannot be used says why.
func (c *controlAPI) ListPools(ctx context.Context, _ *controlpb.ListRequest) (*controlpb.PoolList, error) {
	list := &controlpb.PoolList{}
	for _, p := range c.s.jail.pools {
		list.Pools = append(list.Pools, describePool(ctx, p))
	}
	return list, nil
}

func describePool(ctx context.Context, p *volume.Pool) *controlpb.Pool {
	cfg := p.Config()
	out := &controlpb.Pool{Name: cfg.Name, Kind: cfg.Kind, Path: cfg.Path, State: "ready"}
	st, err := p.State(ctx)
	if err != nil {
		out.State = err.Error()
		return out
	}
	out.Id, out.Size, out.Free, out.Volumes = st.ID, st.Size, st.Free, uint64(st.Volumes)
	return out
}

// InitPool is volume.Pool.Init.
func (c *controlAPI) InitPool(ctx context.Context, r *controlpb.PoolRequest) (*controlpb.Pool, error) {
	p, err := c.s.poolByName(r.Pool)
	if err != nil {
		return nil, err
	}
	if err := p.Init(ctx); err != nil {
		return nil, err
	}
	return describePool(ctx, p), nil
}

// CreateVolume is volume.Pool.Create.
func (c *controlAPI) CreateVolume(ctx context.Context, r *controlpb.CreateVolumeRequest) (*controlpb.Volume, error) {
	p, err := c.s.poolByName(r.Pool)
	if err != nil {
		return nil, err
	}
	n := volume.Name{Volume: r.Name}
	if err := mayChange(ctx, p, n); err != nil {
		return nil, err
	}
	v, err := c.s.withinQuota(ctx, p, n, n, r.Size, func(owner string) (volume.Volume, error) {
		return p.Create(ctx, r.Name, volume.CreateOptions{Size: r.Size, Owner: owner, Private: r.Private})
	})
	return c.s.answerVolume(p, v, err)
}

// answerVolume returns a volume with those who have it open.
func (s *Server) answerVolume(p *volume.Pool, v volume.Volume, err error) (*controlpb.Volume, error) {
	if err != nil {
		return nil, err
	}
	return describeVolume(p, v, s.nodeUsers()), nil
}

func describeVolume(p *volume.Pool, v volume.Volume, users map[nodeID]*nodeUse) *controlpb.Volume {
	out := &controlpb.Volume{
		Pool: p.Config().Name, Name: v.Volume, Snapshot: v.Name.Snapshot, Size: v.Size, Allocated: v.Allocated,
		Owner: v.Owner, Source: v.Source, Copied: v.Copied, Private: v.Private,
	}
	if !v.Created.IsZero() {
		out.CreatedUnixNs = v.Created.UnixNano()
	}
	for identity, access := range v.Grants {
		out.Grants = append(out.Grants, &controlpb.VolumeGrant{Identity: identity, Access: access})
	}
	slices.SortFunc(out.Grants, func(a, b *controlpb.VolumeGrant) int { return strings.Compare(a.Identity, b.Identity) })
	if u := users[nodeID{dev: v.ID.Dev, ino: v.ID.Ino}]; u != nil {
		out.Readers, out.Writers = uint32(u.readers), uint32(u.writers)
	}
	return out
}

// DeleteVolume is volume.Pool.Delete.
func (c *controlAPI) DeleteVolume(ctx context.Context, r *controlpb.DeleteVolumeRequest) (*controlpb.Empty, error) {
	p, err := c.s.poolByName(r.Pool)
	if err != nil {
		return nil, err
	}
	n := volume.Name{Volume: r.Name}
	if err := mayChange(ctx, p, n); err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, p.Delete(ctx, n, r.KeepSnapshots)
}

// ListVolumes lists the volumes of one pool or of all, in the order of their names. A
// pool that cannot be used is an error if it is named, and is left out otherwise.
func (c *controlAPI) ListVolumes(ctx context.Context, r *controlpb.ListVolumesRequest) (*controlpb.VolumeList, error) {
	pools := c.s.jail.pools
	if r.Pool != "" {
		p, err := c.s.poolByName(r.Pool)
		if err != nil {
			return nil, err
		}
		pools = []*volume.Pool{p}
	}
	users := c.s.nodeUsers()
	list := &controlpb.VolumeList{}
	for _, p := range pools {
		volumes, err := p.List(ctx)
		if err != nil && r.Pool != "" {
			return nil, err
		}
		for _, v := range volumes {
			if wanted(r, v) {
				list.Volumes = append(list.Volumes, describeVolume(p, v, users))
			}
		}
	}
	return list, nil
}

func wanted(r *controlpb.ListVolumesRequest, v volume.Volume) bool {
	switch {
	case r.Name != "" && v.Volume != r.Name:
		return false
	case r.Snapshot != "":
		return v.Name.Snapshot == r.Snapshot
	}
	return v.Name.Snapshot == "" || r.Snapshots
}

// ResizeVolume is volume.Pool.Resize.
func (c *controlAPI) ResizeVolume(ctx context.Context, r *controlpb.ResizeVolumeRequest) (*controlpb.Volume, error) {
	p, err := c.s.poolByName(r.Pool)
	if err != nil {
		return nil, err
	}
	n := volume.Name{Volume: r.Name}
	if err := mayChange(ctx, p, n); err != nil {
		return nil, err
	}
	v, err := c.s.withinQuota(ctx, p, n, n, r.Size, func(string) (volume.Volume, error) {
		return p.Resize(ctx, r.Name, r.Size, r.Shrink)
	})
	return c.s.answerVolume(p, v, err)
}

// CreateSnapshot is volume.Pool.Snapshot.
func (c *controlAPI) CreateSnapshot(ctx context.Context, r *controlpb.CreateSnapshotRequest) (*controlpb.Volume, error) {
	p, err := c.s.poolByName(r.Pool)
	if err != nil {
		return nil, err
	}
	n, source := volume.Name{Volume: r.Name, Snapshot: r.Snapshot}, volume.Name{Volume: r.Name}
	if err := errors.Join(mayChange(ctx, p, source), mayChange(ctx, p, n)); err != nil {
		return nil, err
	}
	v, err := c.s.withinQuota(ctx, p, n, source, 0, func(owner string) (volume.Volume, error) {
		return p.Snapshot(ctx, r.Name, r.Snapshot, owner)
	})
	return c.s.answerVolume(p, v, err)
}

// DeleteSnapshot is volume.Pool.Delete for a snapshot.
func (c *controlAPI) DeleteSnapshot(ctx context.Context, r *controlpb.DeleteSnapshotRequest) (*controlpb.Empty, error) {
	p, err := c.s.poolByName(r.Pool)
	if err != nil {
		return nil, err
	}
	if err := volume.CheckName(r.Snapshot); err != nil { // an empty one would be the volume
		return nil, fmt.Errorf("delete a snapshot of %q: %w", r.Name, err)
	}
	n := volume.Name{Volume: r.Name, Snapshot: r.Snapshot}
	if err := mayChange(ctx, p, n); err != nil {
		return nil, err
	}
	return &controlpb.Empty{}, p.Delete(ctx, n, false)
}

// CloneVolume is volume.Pool.Clone.
func (c *controlAPI) CloneVolume(ctx context.Context, r *controlpb.CloneVolumeRequest) (*controlpb.Volume, error) {
	p, err := c.s.poolByName(r.Pool)
	if err != nil {
		return nil, err
	}
	from, err := volume.ParseName(r.Source)
	if err != nil {
		return nil, fmt.Errorf("clone: %w", err)
	}
	n := volume.Name{Volume: r.Name}
	if err := errors.Join(mayChange(ctx, p, from), mayChange(ctx, p, n)); err != nil {
		return nil, err
	}
	v, err := c.s.withinQuota(ctx, p, n, from, r.Size, func(owner string) (volume.Volume, error) {
		return p.Clone(ctx, from, r.Name, volume.CreateOptions{Size: r.Size, Owner: owner, Private: r.Private})
	})
	return c.s.answerVolume(p, v, err)
}

// PublishVolume is volume.Pool.Publish.
func (c *controlAPI) PublishVolume(ctx context.Context, r *controlpb.PublishVolumeRequest) (*controlpb.Volume, error) {
	p, err := c.s.poolByName(r.Pool)
	if err != nil {
		return nil, err
	}
	mode, ok := blk.ParseAccessMode(r.Access)
	switch {
	case !ok:
		return nil, fmt.Errorf("publish volume %q: %q is no access mode, write ro, rw or migration: %w", r.Name, r.Access, syscall.EINVAL)
	case r.Identity == "":
		return nil, fmt.Errorf("publish volume %q: the identity is empty: %w", r.Name, syscall.EINVAL)
	case r.Snapshot != "" && mode != blk.ReadOnly:
		return nil, fmt.Errorf("publish %s@%s: a snapshot is read-only: %w", r.Name, r.Snapshot, syscall.EINVAL)
	}
	n := volume.Name{Volume: r.Name, Snapshot: r.Snapshot}
	if err := mayChange(ctx, p, n); err != nil {
		return nil, err
	}
	v, err := p.Publish(ctx, n, r.Identity, mode.String())
	return c.s.answerVolume(p, v, err)
}

// unpublishTime bounds an UnpublishVolume whose caller has no deadline.
const unpublishTime = 30 * time.Second

// UnpublishVolume is volume.Pool.Unpublish.
func (c *controlAPI) UnpublishVolume(ctx context.Context, r *controlpb.UnpublishVolumeRequest) (*controlpb.Empty, error) {
	p, err := c.s.poolByName(r.Pool)
	if err != nil {
		return nil, err
	}
	if r.Identity == "" {
		return nil, fmt.Errorf("unpublish volume %q: the identity is empty: %w", r.Name, syscall.EINVAL)
	}
	n := volume.Name{Volume: r.Name, Snapshot: r.Snapshot}
	if err := mayChange(ctx, p, n); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, unpublishTime)
	defer cancel()
	return &controlpb.Empty{}, p.Unpublish(ctx, n, r.Identity, func(id volume.ID) error {
		return c.s.closeForIdentity(ctx, id, r.Identity)
	})
}

// closeForIdentity closes a volume for all sessions of an identity, and returns when
// nothing of them can reach it any more. ETIMEDOUT: ctx has ended before. The closing
// goes on then.
func (s *Server) closeForIdentity(ctx context.Context, id volume.ID, identity string) error {
	var closing []*mapping
	for i := range s.sessions {
		sess := s.sessions[i].Load()
		if sess == nil {
			continue
		}
		for _, m := range sess.allMappings() {
			if m.identity == identity && m.dev.key.id == (nodeID{dev: id.Dev, ino: id.Ino}) {
				closing = append(closing, m)
				go s.forceClose(m, "the volume is unpublished") // it waits for the mapping's requests
			}
		}
	}
	if pollUntil(ctx, func() bool { return !slices.ContainsFunc(closing, func(m *mapping) bool { return !m.released.Load() }) }) {
		return nil
	}
	var left int64
	for _, m := range closing {
		left += m.inFlight()
	}
	return fmt.Errorf("%d requests of %q have not ended: its writes may still reach the volume: %w", left, identity, syscall.ETIMEDOUT)
}
