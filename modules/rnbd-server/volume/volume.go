package volume

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Volume describes a volume or a snapshot.
type Volume struct {
	Name
	ID        ID
	Size      uint64 // bytes that clients see
	Allocated uint64 // bytes that the file occupies; shared ones count for each
	Meta
}

// sectorSize is what a size is a multiple of, in bytes.
const sectorSize = 512

func checkSize(size uint64) error {
	if size == 0 || size%sectorSize != 0 || size>>63 != 0 {
		return fmt.Errorf("size of %d bytes: it is a multiple of %d above 0: %w", size, sectorSize, syscall.EINVAL)
	}
	return nil
}

// CreateOptions say what Create makes.
type CreateOptions struct {
	Size    uint64 // bytes, a multiple of 512
	Owner   string // identity; empty: an administrator of the host
	Private bool   // no client may open it before Publish
}

// Create makes a volume of zeros that occupies no space. A volume of that name and
// size is returned as it is. EEXIST: its size is another one.
func (p *Pool) Create(ctx context.Context, name string, o CreateOptions) (Volume, error) {
	v, err := p.create(ctx, name, o)
	if err != nil {
		return v, fmt.Errorf("create volume %q: %w", name, err)
	}
	return v, nil
}

func (p *Pool) create(ctx context.Context, name string, o CreateOptions) (Volume, error) {
	n := Name{Volume: name}
	if err := errors.Join(n.check(), checkSize(o.Size)); err != nil {
		return Volume{}, err
	}
	w, unlock, err := p.lock(ctx, name)
	if err != nil {
		return Volume{}, err
	}
	defer unlock()
	v, found, err := w.existing(n, o.Size, "")
	if found || err != nil {
		return v, err
	}
	meta := Meta{Owner: o.Owner, Created: time.Now().UTC(), Private: o.Private}
	return w.make(n, &meta, o.Size, func(f *os.File) error { return w.truncate(f, int64(o.Size)) })
}

// lock opens the folder and takes the lock of a volume and its snapshots. unlock gives
// back both.
func (p *Pool) lock(ctx context.Context, volume string) (w *work, unlock func(), err error) {
	release, err := p.names.take(ctx, volume)
	if err != nil {
		return nil, nil, err
	}
	if w, err = p.begin(); err != nil {
		release()
		return nil, nil, err
	}
	return w, func() { w.end(); release() }, nil
}

// existing returns the volume n if it exists, and EEXIST if it has another size or
// source. size 0 stands for any.
func (w *work) existing(n Name, size uint64, source string) (v Volume, found bool, err error) {
	v, err = w.show(n)
	switch {
	case errors.Is(err, syscall.ENOENT):
		return v, false, nil
	case err != nil:
		return v, false, err
	case v.Source != source:
		return v, true, fmt.Errorf("it exists, and was made of %s and not of %s: %w", sourceText(v.Source), sourceText(source), syscall.EEXIST)
	case size != 0 && v.Size != size:
		return v, true, fmt.Errorf("it exists, and has %d bytes and not %d: %w", v.Size, size, syscall.EEXIST)
	}
	return v, true, w.syncFolder() // the process that made it may have ended before it did
}

func sourceText(source string) string {
	if source == "" {
		return "nothing"
	}
	return fmt.Sprintf("%q", source)
}

// make makes a volume of what fill puts into its file, and of meta as it is afterwards.
// If another process has made one of that name meanwhile, make returns that one, as
// existing does.
func (w *work) make(n Name, meta *Meta, size uint64, fill func(f *os.File) error) (Volume, error) {
	err := makeFile(w, n.String(), func(f *os.File) error {
		if err := fill(f); err != nil {
			return err
		}
		return w.setMeta(f, meta)
	})
	switch {
	case errors.Is(err, syscall.EEXIST):
		v, _, err := w.existing(n, size, meta.Source)
		return v, err
	case err != nil:
		return Volume{}, err
	}
	return w.show(n)
}

func (w *work) setMeta(f *os.File, meta *Meta) error {
	text, err := meta.encode()
	if err != nil {
		return err
	}
	return w.setAttr(f, text)
}

// makeFile makes a file that is there when it is whole. EEXIST: it is there.
func makeFile(d folder, name string, fill func(f *os.File) error) error {
	temp := tempPrefix + rand.Text()
	f, err := d.create(temp)
	if err != nil {
		return err
	}
	defer f.Close()
	err = fill(f)
	if err == nil {
		err = d.sync(f)
	}
	if err == nil {
		err = d.rename(temp, name)
	}
	if err != nil {
		return errors.Join(err, d.remove(temp))
	}
	return d.syncFolder()
}

// show returns a volume. ENOENT: there is none of that name.
func (w *work) show(n Name) (Volume, error) {
	st, err := w.stat(n.String())
	if err != nil {
		return Volume{}, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return Volume{}, fmt.Errorf("%s is no regular file: %w", n, syscall.EINVAL)
	}
	text, err := w.attr(n.String())
	if err != nil {
		return Volume{}, err
	}
	meta, err := decodeMeta(text)
	if err != nil {
		return Volume{}, fmt.Errorf("%s: %w", n, err)
	}
	return Volume{Name: n, ID: ID{st.Dev, st.Ino}, Size: uint64(st.Size), Allocated: uint64(st.Blocks) * sectorSize, Meta: meta}, nil
}

// Show returns a volume or a snapshot. ENOENT: there is none of that name.
func (p *Pool) Show(_ context.Context, n Name) (Volume, error) {
	if err := n.check(); err != nil {
		return Volume{}, err
	}
	w, err := p.begin()
	if err != nil {
		return Volume{}, err
	}
	defer w.end()
	return w.show(n)
}

// List returns the volumes and the snapshots, in the order of their names. Files with
// other names are no volumes.
func (p *Pool) List(context.Context) ([]Volume, error) {
	w, err := p.begin()
	if err != nil {
		return nil, err
	}
	defer w.end()
	names, err := w.names()
	if err != nil {
		return nil, fmt.Errorf("list pool %q: %w", p.cfg.Name, err)
	}
	slices.Sort(names)
	var out []Volume
	for _, name := range names {
		n, err := ParseName(name)
		if err != nil {
			continue
		}
		v, err := w.show(n)
		switch {
		case err == nil:
			out = append(out, v)
		case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.EINVAL): // deleted meanwhile, or a folder
		default:
			return nil, fmt.Errorf("list pool %q: %w", p.cfg.Name, err)
		}
	}
	return out, nil
}

// Delete deletes a volume or a snapshot. One that does not exist is no error. EBUSY:
// a client has it open. ENOTEMPTY: it has snapshots, which stay if keepSnapshots is
// set.
func (p *Pool) Delete(ctx context.Context, n Name, keepSnapshots bool) error {
	if err := p.delete(ctx, n, keepSnapshots); err != nil {
		return fmt.Errorf("delete volume %q: %w", n, err)
	}
	return nil
}

func (p *Pool) delete(ctx context.Context, n Name, keepSnapshots bool) error {
	if err := n.check(); err != nil {
		return err
	}
	w, unlock, err := p.lock(ctx, n.Volume)
	if err != nil {
		return err
	}
	defer unlock()
	v, err := w.show(n)
	if errors.Is(err, syscall.ENOENT) {
		return w.syncFolder() // the process that deleted it may have ended before it did
	}
	if err != nil {
		return err
	}
	if n.Snapshot == "" && !keepSnapshots {
		if err := w.checkNoSnapshots(n); err != nil {
			return err
		}
	}
	uses, release, err := p.users.Hold(ctx, v.ID)
	if err != nil {
		return err
	}
	defer release()
	if uses != (Uses{}) {
		return inUse(uses)
	}
	if err := w.remove(n.String()); err != nil {
		return err
	}
	return w.syncFolder()
}

func inUse(u Uses) error {
	return fmt.Errorf("clients have it open, %d to write and %d to read: %w", u.Writers, u.Readers, syscall.EBUSY)
}

// checkNoSnapshots returns ENOTEMPTY if n has snapshots.
func (w *work) checkNoSnapshots(n Name) error {
	names, err := w.names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasPrefix(name, n.Volume+"@") {
			return fmt.Errorf("it has snapshots, as %q: delete them before, or keep them: %w", name, syscall.ENOTEMPTY)
		}
	}
	return nil
}

// Resize sets the size of a volume, in bytes, and tells its clients. EINVAL: the size
// is smaller, and shrink is not set. EBUSY: it is smaller, and a client has the volume
// open.
func (p *Pool) Resize(ctx context.Context, name string, size uint64, shrink bool) (Volume, error) {
	v, err := p.resize(ctx, name, size, shrink)
	if err != nil {
		return v, fmt.Errorf("resize volume %q: %w", name, err)
	}
	return v, nil
}

func (p *Pool) resize(ctx context.Context, name string, size uint64, shrink bool) (Volume, error) {
	n := Name{Volume: name}
	if err := errors.Join(n.check(), checkSize(size)); err != nil {
		return Volume{}, err
	}
	w, unlock, err := p.lock(ctx, name)
	if err != nil {
		return Volume{}, err
	}
	defer unlock()
	v, err := w.show(n)
	if err != nil {
		return v, err
	}
	if size < v.Size && !shrink {
		return v, fmt.Errorf("it has %d bytes, and the data beyond %d would be lost: %w", v.Size, size, syscall.EINVAL)
	}
	if err := p.setSize(ctx, w, v, size); err != nil {
		return v, err
	}
	if err := p.users.Resized(ctx, v.ID); err != nil {
		return v, fmt.Errorf("it has the new size, and clients that have it open do not see it yet: %w", err)
	}
	return w.show(n)
}

// setSize sets the size of v. No client opens or closes it meanwhile.
func (p *Pool) setSize(ctx context.Context, w *work, v Volume, size uint64) error {
	uses, release, err := p.users.Hold(ctx, v.ID)
	if err != nil {
		return err
	}
	defer release()
	if size < v.Size && uses != (Uses{}) {
		return inUse(uses)
	}
	f, err := w.open(v.String(), unix.O_RDWR)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := w.truncate(f, int64(size)); err != nil {
		return err
	}
	return w.sync(f)
}
