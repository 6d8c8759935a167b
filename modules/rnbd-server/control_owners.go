package server

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-server/volume"
)

// Remote administrators with the role volumes change the volumes that they have created,
// within their quotas.

// mayChange returns EACCES if a volume belongs to another identity than that of the call. A
// volume that does not exist belongs to none.
func mayChange(ctx context.Context, p *volume.Pool, n volume.Name) error {
	a := control.ActorOf(ctx)
	if a.Role >= control.Admin {
		return nil
	}
	v, err := p.Show(ctx, n)
	switch {
	case errors.Is(err, syscall.ENOENT):
		return nil
	case err != nil:
		return err
	case v.Owner != a.Identity:
		return fmt.Errorf("volume %q: %q has not created it: %w", n, a.Identity, syscall.EACCES)
	}
	return nil
}

// withinQuota runs change, which makes the volume n have size bytes, if the identity of the
// call may have as many. size 0 stands for the size of source. EDQUOT: it may not.
func (s *Server) withinQuota(ctx context.Context, p *volume.Pool, n, source volume.Name, size uint64, change func(owner string) (volume.Volume, error)) (volume.Volume, error) {
	a := control.ActorOf(ctx)
	if a.Quota == 0 {
		return change(a.Identity)
	}
	s.quotas.Lock()
	defer s.quotas.Unlock()
	if size == 0 {
		v, err := p.Show(ctx, source)
		if err != nil {
			return v, err
		}
		size = v.Size
	}
	has, err := s.owned(ctx, a.Identity, p, n)
	if err != nil {
		return volume.Volume{}, err
	}
	if size > a.Quota || has > a.Quota-size {
		return volume.Volume{}, fmt.Errorf("volume %q: %q has volumes of %d bytes, and may have %d with this one of %d: %w", n, a.Identity, has, a.Quota, size, syscall.EDQUOT)
	}
	return change(a.Identity)
}

// owned returns the sum of the sizes of the volumes of an identity in all pools, without
// the volume n of the pool except. Pools that cannot be used have none.
func (s *Server) owned(ctx context.Context, identity string, except *volume.Pool, n volume.Name) (sum uint64, err error) {
	for _, p := range s.jail.pools {
		list, err := p.List(ctx)
		if err != nil && p == except {
			return 0, err
		}
		for _, v := range list {
			if v.Owner == identity && (p != except || v.Name != n) {
				sum += v.Size
			}
		}
	}
	return sum, nil
}
