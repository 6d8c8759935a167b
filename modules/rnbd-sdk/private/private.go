// Package private opens folders and files that only their owner can change, for
// a daemon's sockets and its state.
//
// In a folder that all users may write to, such as /tmp, another user can make
// such a folder or file beforehand, or a link in its place. Links are refused,
// and so is anything that belongs to another user. All users trust root.
package private

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Folder opens the folder dir. If there is none, it makes it with mode 0700.
// The file names the folder only (O_PATH); the caller closes it. EPERM in the
// chain: the folder belongs to another user, or others can rename its
// entries. ENOTDIR: it is a link, or no folder.
func Folder(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	return Look(dir)
}

// Look is Folder for a folder that is not made: ENOENT in the chain.
func Look(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOTDIR) {
		return nil, fmt.Errorf("%s is a link or no folder: name the folder itself: %w", dir, err)
	}
	if err != nil {
		return nil, fmt.Errorf("folder %s: %w", dir, err)
	}
	f := os.NewFile(uintptr(fd), dir)
	if err := checkFolder(f, os.Geteuid()); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// checkFolder reports whether user uid can rely on the folder. A folder with
// the sticky bit is as good as a private one: others cannot rename its
// entries. Write access of a group is its owner's decision.
func checkFolder(f *os.File, uid int) error {
	st, err := status(f)
	if err != nil {
		return err
	}
	if st.Uid != 0 && int(st.Uid) != uid {
		return fmt.Errorf("folder %s belongs to user %d, not to user %d: remove it, or name another: %w", f.Name(), st.Uid, uid, syscall.EPERM)
	}
	if st.Mode&0o002 != 0 && st.Mode&unix.S_ISVTX == 0 {
		return fmt.Errorf("folder %s can be written by everybody (mode %04o): chmod it to 0700, or name another: %w", f.Name(), st.Mode&0o7777, syscall.EPERM)
	}
	return nil
}

func status(f *os.File) (st unix.Stat_t, err error) {
	if err = unix.Fstat(int(f.Fd()), &st); err != nil {
		err = fmt.Errorf("%s: %w", f.Name(), err)
	}
	return st, err
}

// holdPatience is how long Hold waits for others.
const holdPatience = 5 * time.Second

// Hold locks the folder against other calls of Hold, of this process and of
// others, until release is called. After 5 s it returns without the lock: another
// process may hang, or may be hostile.
func Hold(dir *os.File) (release func()) {
	fd, err := unix.Openat(int(dir.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return func() {}
	}
	for end := time.Now().Add(holdPatience); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != unix.EWOULDBLOCK && err != unix.EINTR {
			break
		}
	}
	return func() { unix.Close(fd) }
}

// Read returns the content of the file name. ENOENT in the chain: there is
// none. EPERM: it belongs to another user. ELOOP: it is a link.
func Read(name string) ([]byte, error) {
	dir, err := Look(filepath.Dir(name))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	fd, err := unix.Openat(int(dir.Fd()), filepath.Base(name), unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	f := os.NewFile(uintptr(fd), name)
	defer f.Close()
	st, err := status(f)
	switch {
	case err != nil:
		return nil, err
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, fmt.Errorf("%s is no regular file: %w", name, syscall.EINVAL)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return nil, fmt.Errorf("%s belongs to user %d, not to user %d: %w", name, st.Uid, os.Geteuid(), syscall.EPERM)
	}
	return io.ReadAll(f)
}

// Replace writes b to the file name, with mode 0600, in place of the file that
// was there; a link is replaced, not followed. When it returns nil the content
// and the name are on the disk. Its folder is made like Folder's.
func Replace(name string, b []byte) error {
	dir, err := Folder(filepath.Dir(name))
	if err != nil {
		return err
	}
	defer dir.Close()
	at, base := int(dir.Fd()), filepath.Base(name)
	next := base + ".new"
	if err := write(at, next, b); err != nil {
		_ = unix.Unlinkat(at, next, 0) // half a file
		return &fs.PathError{Op: "write", Path: name + ".new", Err: err}
	}
	if err := unix.Renameat(at, next, at, base); err != nil {
		return &fs.PathError{Op: "rename", Path: name, Err: err}
	}
	return sync(dir)
}

// write makes a new file, so that it belongs to this user and is no link.
func write(dir int, name string, b []byte) error {
	if err := unix.Unlinkat(dir, name, 0); err != nil && !errors.Is(err, unix.ENOENT) {
		return err
	}
	fd, err := unix.Openat(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// Remove removes the file name, for good. One that is not there is no error.
func Remove(name string) error {
	dir, err := Look(filepath.Dir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	err = unix.Unlinkat(int(dir.Fd()), filepath.Base(name), 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return &fs.PathError{Op: "remove", Path: name, Err: err}
	}
	return sync(dir)
}

// sync writes the names in the folder to the disk; an O_PATH file cannot.
func sync(dir *os.File) error {
	fd, err := unix.Openat(int(dir.Fd()), ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("folder %s: %w", dir.Name(), err)
	}
	defer unix.Close(fd)
	if err := unix.Fsync(fd); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: it has no disk
		return fmt.Errorf("folder %s: %w", dir.Name(), err)
	}
	return nil
}
