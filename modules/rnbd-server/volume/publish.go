package volume

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Publish allows an identity to open a volume or a snapshot in a mode, "ro", "rw" or
// "migration", each with those before it. From then on no other client may, whatever the
// rules of access say. EEXIST: the identity may open it in another mode. E2BIG: it is
// published to more identities than the file system keeps.
func (p *Pool) Publish(ctx context.Context, n Name, identity, mode string) (Volume, error) {
	v, err := p.change(ctx, n, func(m *Meta) error {
		if had := m.Grants[identity]; had != "" && had != mode {
			return fmt.Errorf("it is published to %q with the access %s and not %s: %w", identity, had, mode, syscall.EEXIST)
		}
		m.Private = true
		m.Grants = maps.Clone(m.Grants)
		if m.Grants == nil {
			m.Grants = map[string]string{}
		}
		m.Grants[identity] = mode
		return nil
	}, nil)
	if err != nil {
		return v, fmt.Errorf("publish volume %q: %w", n, err)
	}
	return v, nil
}

// Unpublish takes the volume away from an identity. closed is called when the identity
// may not open it any more; Unpublish succeeds when closed has succeeded and the change
// is durable. A volume that does not exist is no error.
func (p *Pool) Unpublish(ctx context.Context, n Name, identity string, closed func(ID) error) error {
	_, err := p.change(ctx, n, func(m *Meta) error {
		m.Private = true
		m.Grants = maps.Clone(m.Grants)
		delete(m.Grants, identity)
		return nil
	}, closed)
	if err != nil && !errors.Is(err, syscall.ENOENT) {
		return fmt.Errorf("unpublish volume %q: %w", n, err)
	}
	return nil
}

// change changes the Meta of a volume, calls then if it is not nil, and makes the change
// durable.
func (p *Pool) change(ctx context.Context, n Name, edit func(*Meta) error, then func(ID) error) (Volume, error) {
	if err := n.check(); err != nil {
		return Volume{}, err
	}
	w, unlock, err := p.lock(ctx, n.Volume)
	if err != nil {
		return Volume{}, err
	}
	defer unlock()
	v, err := w.show(n)
	if err != nil {
		return v, err
	}
	if err := edit(&v.Meta); err != nil {
		return v, err
	}
	f, err := w.open(n.String(), unix.O_RDONLY)
	if err != nil {
		return v, err
	}
	defer f.Close()
	return v, w.changeMeta(f, v, then)
}

func (w *work) changeMeta(f *os.File, v Volume, then func(ID) error) error {
	if err := w.setMeta(f, &v.Meta); err != nil {
		return err
	}
	if then != nil {
		if err := then(v.ID); err != nil {
			return err
		}
	}
	return w.sync(f)
}
