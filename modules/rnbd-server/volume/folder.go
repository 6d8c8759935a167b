package volume

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// attribute is the extended attribute with a volume's Meta.
const attribute = "user.rnbd"

// folder is what a pool asks of its file system. Each method is one system call, or
// one that changes something and some that read. Tests end a process before any of
// them.
type folder interface {
	create(name string) (*os.File, error) // EEXIST: it exists
	open(name string, flags int) (*os.File, error)
	names() ([]string, error)
	stat(name string) (unix.Stat_t, error) // of the name itself, not of what a link points to
	attr(name string) ([]byte, error)      // nil: there is none
	setAttr(f *os.File, value []byte) error
	truncate(f *os.File, size int64) error
	reflink(to, from *os.File) error
	copyRange(to, from *os.File, off, n int64) error
	sync(f *os.File) error
	rename(from, to string) error // EEXIST: to exists
	remove(name string) error
	syncFolder() error
	space() (size, free uint64, err error)
	close() error
}

// osFolder is a folder of this host.
type osFolder struct{ dir *os.File }

func openFolder(path string) (*osFolder, error) {
	dir, err := os.OpenFile(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return &osFolder{dir}, nil
}

func (d *osFolder) fd() int { return int(d.dir.Fd()) }

// path returns a path of a name below the descriptor of the folder, for calls that
// take no descriptor.
func (d *osFolder) path(name string) string { return fmt.Sprintf("/proc/self/fd/%d/%s", d.fd(), name) }

func (d *osFolder) fail(op, name string, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: d.dir.Name() + "/" + name, Err: err}
}

func (d *osFolder) openat(name string, flags int) (*os.File, error) {
	fd, err := unix.Openat(d.fd(), name, flags|unix.O_CLOEXEC|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, d.fail("open", name, err)
	}
	return os.NewFile(uintptr(fd), d.dir.Name()+"/"+name), nil
}

func (d *osFolder) create(name string) (*os.File, error) {
	return d.openat(name, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL)
}

func (d *osFolder) open(name string, flags int) (*os.File, error) { return d.openat(name, flags) }

func (d *osFolder) names() ([]string, error) {
	if _, err := d.dir.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return d.dir.Readdirnames(-1)
}

func (d *osFolder) stat(name string) (st unix.Stat_t, err error) {
	return st, d.fail("stat", name, unix.Fstatat(d.fd(), name, &st, unix.AT_SYMLINK_NOFOLLOW))
}

func (d *osFolder) attr(name string) ([]byte, error) {
	var buf [maxMeta]byte
	n, err := unix.Lgetxattr(d.path(name), attribute, buf[:])
	return attributeOf(buf[:max(n, 0)], d.fail("read attribute "+attribute, name, err))
}

// attributeOf turns the lack of an attribute into an empty one.
func attributeOf(text []byte, err error) ([]byte, error) {
	if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil, nil
	}
	return text, err
}

func (d *osFolder) setAttr(f *os.File, value []byte) error {
	return d.fail("set attribute "+attribute, baseName(f), unix.Fsetxattr(int(f.Fd()), attribute, value, 0))
}

func (d *osFolder) truncate(f *os.File, size int64) error { return f.Truncate(size) }

func (d *osFolder) reflink(to, from *os.File) error {
	return unix.IoctlFileClone(int(to.Fd()), int(from.Fd()))
}

func (d *osFolder) copyRange(to, from *os.File, off, n int64) error {
	for _, f := range []*os.File{to, from} {
		if _, err := f.Seek(off, io.SeekStart); err != nil {
			return err
		}
	}
	copied, err := io.Copy(to, io.LimitReader(from, n)) // which is copy_file_range(2)
	if err == nil && copied < n {
		err = io.ErrUnexpectedEOF
	}
	return err
}

func (d *osFolder) sync(f *os.File) error { return f.Sync() }

func (d *osFolder) rename(from, to string) error {
	return d.fail("rename "+from+" to", to, unix.Renameat2(d.fd(), from, d.fd(), to, unix.RENAME_NOREPLACE))
}

func (d *osFolder) remove(name string) error {
	return d.fail("remove", name, unix.Unlinkat(d.fd(), name, 0))
}

func (d *osFolder) syncFolder() error { return d.dir.Sync() }

func (d *osFolder) space() (size, free uint64, err error) {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(d.fd(), &fs); err != nil {
		return 0, 0, d.fail("statfs", "", err)
	}
	return fs.Blocks * uint64(fs.Frsize), fs.Bavail * uint64(fs.Frsize), nil
}

func (d *osFolder) close() error { return d.dir.Close() }

func baseName(f *os.File) string { return f.Name()[strings.LastIndexByte(f.Name(), '/')+1:] }
