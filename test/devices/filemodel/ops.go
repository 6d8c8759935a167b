package filemodel

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// file is a file with its model.
type file struct {
	path  string
	f     *os.File // nil while it is closed
	want  []byte
	trace []string // the last things done
}

const traceLen = 24

func (f *file) note(format string, args ...any) {
	f.trace = append(f.trace, fmt.Sprintf(format, args...))
	f.trace = f.trace[max(0, len(f.trace)-traceLen):]
}

// op is something to do to a file at off, n bytes long.
type op struct {
	name   string
	weight int
	do     func(f *file, off, n, step int) error
}

var ops = []op{
	{"write", 24, (*file).write},
	{"read", 20, (*file).read},
	{"mapped write", 12, (*file).mappedWrite},
	{"mapped read", 12, (*file).mappedRead},
	{"punch hole", 8, (*file).punch},
	{"truncate", 8, (*file).truncate},
	{"fsync", 6, (*file).sync},
	{"reopen", 4, (*file).reopen},
}

// pick has each op as often as it weighs.
var pick = func() (p []int) {
	for i, o := range ops {
		for range o.weight {
			p = append(p, i)
		}
	}
	return p
}()

func (f *file) open() (err error) {
	if f.f == nil {
		f.f, err = os.OpenFile(f.path, os.O_RDWR, 0)
	}
	return err
}

func (f *file) close() error {
	if f.f == nil {
		return nil
	}
	defer func() { f.f = nil }()
	return f.f.Close()
}

// grow makes the model at least size bytes long, with zeros.
func (f *file) grow(size int) {
	if more := size - len(f.want); more > 0 {
		f.want = append(f.want, make([]byte, more)...)
	}
}

func (f *file) write(off, n, step int) error {
	if err := f.open(); err != nil {
		return err
	}
	f.grow(off + n)
	fill(f.want[off:off+n], off, step)
	_, err := f.f.WriteAt(f.want[off:off+n], int64(off))
	return err
}

// inside cuts a place to the length of the file; n is 0 if the file ends before
// it.
func (f *file) inside(off, n int) int { return max(0, min(n, len(f.want)-off)) }

// read wants the end of the file where the model ends.
func (f *file) read(off, n, _ int) error {
	if err := f.open(); err != nil {
		return err
	}
	buf := make([]byte, n)
	got, err := f.f.ReadAt(buf, int64(off))
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if want := f.inside(off, n); got != want {
		return fmt.Errorf("read %d bytes at %d of %d, got %d", n, off, len(f.want), got)
	}
	return compare(buf[:got], f.want[min(off, len(f.want)):][:got], off)
}

// mapped maps the pages of a place. The place must lie in the file.
func (f *file) mapped(off, n, prot int, use func([]byte) error) error {
	if err := f.open(); err != nil {
		return err
	}
	from := off &^ (os.Getpagesize() - 1)
	m, err := unix.Mmap(int(f.f.Fd()), int64(from), off+n-from, prot, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("mmap: %w", err)
	}
	return errors.Join(use(m[off-from:]), unix.Munmap(m))
}

func (f *file) mappedWrite(off, n, step int) error {
	if n = f.inside(off, n); n == 0 {
		return nil
	}
	fill(f.want[off:off+n], off, step)
	return f.mapped(off, n, unix.PROT_READ|unix.PROT_WRITE, func(m []byte) error {
		copy(m, f.want[off:off+n])
		return nil
	})
}

func (f *file) mappedRead(off, n, _ int) error {
	if n = f.inside(off, n); n == 0 {
		return nil
	}
	return f.mapped(off, n, unix.PROT_READ, func(m []byte) error { return compare(m, f.want[off:off+n], off) })
}

func (f *file) punch(off, n, _ int) error {
	if err := f.open(); err != nil {
		return err
	}
	clear(f.want[min(off, len(f.want)):][:f.inside(off, n)])
	err := unix.Fallocate(int(f.f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off), int64(n))
	if err != nil {
		return fmt.Errorf("fallocate: %w", err)
	}
	return nil
}

// truncate ends the file at off.
func (f *file) truncate(off, _, _ int) error {
	if err := f.open(); err != nil {
		return err
	}
	f.grow(off)
	f.want = f.want[:off:off]
	return f.f.Truncate(int64(off))
}

func (f *file) sync(_, _, _ int) error {
	if err := f.open(); err != nil {
		return err
	}
	return f.f.Sync()
}

// reopen closes the file with nothing of it in the page cache, so that the
// next read comes from the disk.
func (f *file) reopen(_, _, _ int) error {
	if err := f.sync(0, 0, 0); err != nil {
		return err
	}
	if err := unix.Fadvise(int(f.f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("fadvise: %w", err)
	}
	return errors.Join(f.close(), f.open())
}

// compareAll wants the size of the model, and its content.
func (f *file) compareAll() error {
	if err := f.open(); err != nil {
		return err
	}
	st, err := f.f.Stat()
	if err != nil {
		return err
	}
	if st.Size() != int64(len(f.want)) {
		return fmt.Errorf("it has %d bytes, and must have %d", st.Size(), len(f.want))
	}
	return f.read(0, len(f.want), 0)
}
