package volume

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// How snapshots and clones are copied.
const (
	Reflink    = "reflink" // by sharing the blocks: at once
	SparseCopy = "copy"    // of the data, without the holes
)

// Snapshot copies a volume as it is now. A snapshot of that name of the volume is
// returned as it is. Every write that a client had an answer to before the call is in
// it, and no write in part. EBUSY: a client has the volume open, and the file system
// has no reflinks. owner is as in CreateOptions; the snapshot is private if the volume
// is.
func (p *Pool) Snapshot(ctx context.Context, volume, snapshot, owner string) (Volume, error) {
	n := Name{volume, snapshot}
	if err := errors.Join(CheckName(snapshot), n.check()); err != nil {
		return Volume{}, fmt.Errorf("snapshot of %q: %w", volume, err)
	}
	v, err := p.copy(ctx, Name{Volume: volume}, n, CreateOptions{Owner: owner})
	if err != nil {
		return v, fmt.Errorf("snapshot %q: %w", n, err)
	}
	return v, nil
}

// Clone makes a volume of another one, or of a snapshot, as Snapshot does. Its size is
// that of the source if o.Size is 0, and never smaller: EINVAL. A volume that was made
// so before is returned as it is. EEXIST: a volume of that name was not.
func (p *Pool) Clone(ctx context.Context, from Name, to string, o CreateOptions) (Volume, error) {
	n := Name{Volume: to}
	err := errors.Join(from.check(), n.check())
	if o.Size != 0 {
		err = errors.Join(err, checkSize(o.Size))
	}
	if err != nil {
		return Volume{}, fmt.Errorf("clone: %w", err)
	}
	v, err := p.copy(ctx, from, n, o)
	if err != nil {
		return v, fmt.Errorf("clone %q to %q: %w", from, to, err)
	}
	return v, nil
}

func (p *Pool) copy(ctx context.Context, from, to Name, o CreateOptions) (Volume, error) {
	w, unlock, err := p.lock(ctx, to.Volume)
	if err != nil {
		return Volume{}, err
	}
	defer unlock()
	v, found, err := w.existing(to, o.Size, from.String())
	if found || err != nil {
		return v, err
	}
	source, err := w.show(from)
	switch {
	case err != nil:
		return v, err
	case o.Size != 0 && o.Size < source.Size:
		return v, fmt.Errorf("%q has %d bytes, and the clone would have %d: %w", from, source.Size, o.Size, syscall.EINVAL)
	}
	meta := Meta{Owner: o.Owner, Created: time.Now().UTC(), Source: from.String(), Snapshot: to.Snapshot != "", Private: o.Private || to.Snapshot != "" && source.Private}
	return w.make(to, &meta, o.Size, func(f *os.File) error {
		if meta.Copied, err = p.copyData(ctx, w, f, source); err != nil || o.Size <= source.Size {
			return err
		}
		return w.truncate(f, int64(o.Size))
	})
}

// copyData copies the data of source into f, and returns how. No client opens or closes the
// source meanwhile.
func (p *Pool) copyData(ctx context.Context, w *work, f *os.File, source Volume) (how string, err error) {
	from, err := w.open(source.String(), unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer from.Close()
	uses, release, err := p.users.Hold(ctx, source.ID)
	if err != nil {
		return "", err
	}
	defer release()
	err = p.reflinkPaused(ctx, w, f, from, source.ID, uses)
	switch {
	case err == nil:
		return Reflink, nil
	case !withoutReflink(err), errors.Is(err, syscall.EBUSY):
		return "", err
	case uses != (Uses{}):
		return "", fmt.Errorf("the file system has no reflinks, as XFS and btrfs have, and copying a volume would stop its clients: %w", inUse(uses))
	}
	return SparseCopy, copySparse(ctx, w, f, from)
}

// reflinkPaused shares the blocks of from while no client writes.
func (p *Pool) reflinkPaused(ctx context.Context, w *work, to, from *os.File, id ID, uses Uses) error {
	if uses.Writers == 0 {
		return w.reflink(to, from)
	}
	resume, err := p.users.Pause(ctx, id)
	if err != nil {
		return err
	}
	return errors.Join(w.reflink(to, from), resume())
}

// withoutReflink reports whether err says that the file system has no reflinks.
func withoutReflink(err error) bool {
	return errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.ENOTTY) || errors.Is(err, syscall.EXDEV) || errors.Is(err, syscall.EINVAL)
}

// copyPiece is how much is copied between two looks at the context, in bytes.
const copyPiece = 16 << 20

// copySparse copies the data of from, and leaves its holes.
func copySparse(ctx context.Context, w *work, to, from *os.File) error {
	st, err := from.Stat()
	if err != nil {
		return err
	}
	size := st.Size()
	for off := int64(0); off < size; {
		data, err := from.Seek(off, unix.SEEK_DATA)
		if errors.Is(err, syscall.ENXIO) { // the rest is a hole
			break
		}
		if err != nil {
			return err
		}
		hole, err := from.Seek(data, unix.SEEK_HOLE)
		if err != nil {
			return err
		}
		for off = data; off < hole; {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			n := min(hole-off, copyPiece)
			if err := w.copyRange(to, from, off, n); err != nil {
				return err
			}
			off += n
		}
	}
	return w.truncate(to, size)
}
