package private

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// MaxSocketPath is the longest path in bytes that a unix address holds, with its
// NUL (unix(7)). Listen and Dial take longer ones; other programs cannot connect
// there.
const MaxSocketPath = 107

// Listen opens a unix socket at path with mode 0600, in a folder that Folder opens
// or makes. It replaces a socket without a process behind it. If a process answers and
// does not end within patience, the error wraps EADDRINUSE; if the file at path is
// no socket, EEXIST. The socket's file stays when the listener is closed.
func Listen(path string, patience time.Duration) (*net.UnixListener, error) {
	dir, err := Folder(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	defer Hold(dir)() // of two processes that start, one makes the socket, and the other one finds it
	addr := shortPath(path, dir)
	if isServed(addr, patience) {
		return nil, fmt.Errorf("another process answers there: %w", syscall.EADDRINUSE)
	}
	if err := removeSocket(path); err != nil {
		return nil, err
	}
	old := syscall.Umask(0o177)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: addr, Net: "unix"})
	syscall.Umask(old)
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	return l, nil
}

// Dial connects to the unix socket at path.
func Dial(ctx context.Context, path string) (net.Conn, error) {
	addr := path
	if len(path) > MaxSocketPath {
		fd, err := unix.Open(filepath.Dir(path), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		if err != nil {
			return nil, &os.PathError{Op: "open", Path: filepath.Dir(path), Err: err}
		}
		dir := os.NewFile(uintptr(fd), filepath.Dir(path))
		defer dir.Close()
		addr = shortPath(path, dir)
	}
	return (&net.Dialer{}).DialContext(ctx, "unix", addr)
}

// shortPath returns a name of path in at most MaxSocketPath bytes, through its open
// folder if path is longer.
func shortPath(path string, dir *os.File) string {
	if len(path) <= MaxSocketPath {
		return path
	}
	return fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))
}

// isServed reports whether a process answers on the socket at addr and does not end
// within patience.
func isServed(addr string, patience time.Duration) bool {
	for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		c, err := net.Dial("unix", addr)
		if err != nil {
			return false
		}
		c.Close()
		if !time.Now().Before(end) {
			return true
		}
	}
}

func removeSocket(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil && st.Mode()&os.ModeSocket == 0 {
		return fmt.Errorf("%s: a file that is no socket is in the way: %w", path, syscall.EEXIST)
	}
	if err = os.Remove(path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
