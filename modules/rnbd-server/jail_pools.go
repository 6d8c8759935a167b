package server

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-server/volume"
)

// The volumes of a pool have the names POOL/VOLUME and POOL/VOLUME@SNAPSHOT for
// clients, with and without a search path. The name of a pool hides a file or folder
// of that name below the search path.

// newPools returns the pools of the configuration. The error is EINVAL.
func newPools(cfg []volume.Config, users volume.Users) ([]*volume.Pool, error) {
	var out []*volume.Pool
	for _, c := range cfg {
		p, err := volume.New(c, users)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(out, func(o *volume.Pool) bool { return o.Config().Name == c.Name }) {
			return nil, fmt.Errorf("pool %q is configured twice: %w", c.Name, syscall.EINVAL)
		}
		out = append(out, p)
	}
	return out, nil
}

// pool returns the pool that a name leads to, and the rest of the name. nil: it leads to
// none.
func (j jail) pool(name string) (p *volume.Pool, rest string) {
	if len(j.pools) == 0 {
		return nil, ""
	}
	first, rest, _ := strings.Cut(path.Clean("/" + name)[1:], "/")
	i := slices.IndexFunc(j.pools, func(p *volume.Pool) bool { return p.Config().Name == first })
	if i < 0 {
		return nil, ""
	}
	return j.pools[i], rest
}

// openVolume opens a volume of a pool by its name there.
func (j jail) openVolume(p *volume.Pool, name string) (*node, error) {
	v, err := volume.ParseName(name)
	if err != nil || strings.Contains(name, "..") {
		return nil, fmt.Errorf("open %q in pool %q: no volume has such a name: %w", name, p.Config().Name, syscall.ENOENT)
	}
	f, err := p.Open(v)
	if err != nil {
		return nil, fmt.Errorf("open %q in pool %q: %w", name, p.Config().Name, err)
	}
	n := &node{file: f, pooled: true}
	errno, why := n.identify(true)
	if errno == 0 && n.block {
		errno, why = syscall.ENOTBLK, "a pool of files has no block devices"
	}
	if errno != 0 {
		f.Close()
		return nil, fmt.Errorf("open %q in pool %q: %s: %w", name, p.Config().Name, why, errno)
	}
	n.size, _ = nodeSize(f)
	return n, nil
}

// checkPresent returns ENOENT if the volume behind n was deleted. The caller has the
// node's turn: it is not deleted from then on.
func (n *node) checkPresent() error {
	if !n.pooled {
		return nil
	}
	raw, err := n.file.SyscallConn()
	if err != nil {
		return err
	}
	var st unix.Stat_t
	var statErr error
	if err := raw.Control(func(fd uintptr) { statErr = unix.Fstat(int(fd), &st) }); err != nil {
		return err
	}
	if statErr == nil && st.Nlink == 0 {
		statErr = fmt.Errorf("it was deleted: %w", syscall.ENOENT)
	}
	return statErr
}

// errPrivate refuses clients that a volume is not published to.
var errPrivate error = &reasoned{"the volume is published to other identities, or to none", syscall.EACCES, errRules.(*reasoned).code}

// granted returns the reason why what is known of a volume forbids c to open it in mode.
func granted(meta *volume.Meta, c access.Client, mode blk.AccessMode) error {
	for _, identity := range c.Identities {
		if allowed, ok := blk.ParseAccessMode(meta.Grants[identity]); ok {
			if mode > allowed {
				return fmt.Errorf("it is published to %q with the access %s: %w", identity, allowed, errPrivate)
			}
			return nil
		}
	}
	return errPrivate
}
