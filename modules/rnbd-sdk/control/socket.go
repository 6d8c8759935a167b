package control

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
)

// DefaultSocket is where a daemon of kind "server" or "client" listens when
// nothing else is said: below /run/rnbd for root, else below XDG_RUNTIME_DIR,
// else in a folder of the user in the system's temporary folder.
func DefaultSocket(kind string) string {
	name := kind + ".sock"
	if os.Geteuid() == 0 {
		return filepath.Join("/run/rnbd", name)
	}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		return filepath.Join(dir, "rnbd", name)
	}
	return filepath.Join(os.TempDir(), "rnbd-"+strconv.Itoa(os.Getuid()), name)
}

// Listen opens the unix socket at path with mode 0600 and makes its folder, if
// necessary, with mode 0700. A stale socket file is replaced; if a daemon answers
// on it, the error wraps EADDRINUSE. Paths that are too long for a unix address
// work too. The error wraps EPERM if the folder belongs to another user or all
// users can write to it.
func Listen(path string) (net.Listener, error) { return ListenGroup(path, nil) }

// ListenGroup is Listen for a socket that the members of a group can open, too: its
// mode is 0660. A folder that only its owner could enter is opened to the group, with
// mode 0710. Authorize bounds what members may do.
func ListenGroup(path string, g *Group) (net.Listener, error) {
	l, err := private.Listen(path, 0)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("control socket %s: another daemon answers on it, stop it or choose another --socket: %w", path, syscall.EADDRINUSE)
	}
	if err != nil {
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	if g != nil {
		if err := g.letIn(path); err != nil {
			l.Close()
			os.Remove(path)
			return nil, fmt.Errorf("control socket %s: give it to group %s: %w", path, g.Name, err)
		}
	}
	return &listener{Listener: l, path: path}, nil
}

// letIn opens a socket and its folder to the group.
func (g *Group) letIn(path string) error {
	dir, err := private.Look(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer dir.Close()
	st, err := dir.Stat()
	if err != nil {
		return err
	}
	if owner := st.Sys().(*syscall.Stat_t).Uid; int(owner) == os.Geteuid() && st.Mode().Perm()&0o077 == 0 {
		if err := unix.Fchownat(int(dir.Fd()), "", -1, g.ID, unix.AT_EMPTY_PATH); err != nil {
			return err
		}
		if err := os.Chmod(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), 0o710); err != nil {
			return err
		}
	}
	if err := unix.Fchownat(int(dir.Fd()), filepath.Base(path), -1, g.ID, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	return unix.Fchmodat(int(dir.Fd()), filepath.Base(path), 0o660, 0)
}

// ListenFile is Listen for a socket that another process has made and keeps, as
// the service manager does: it stays when the listener is closed. Members of g may
// connect, unless it is nil. f is closed.
func ListenFile(f *os.File, path string, g *Group) (net.Listener, error) {
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("control socket: descriptor %q does not listen: %w", f.Name(), err)
	}
	if a, ok := l.Addr().(*net.UnixAddr); !ok || a.Name != path {
		l.Close()
		return nil, fmt.Errorf("control socket: the service manager holds %s, and the daemon was told %s: %w", l.Addr(), path, syscall.EINVAL)
	}
	if g == nil {
		return l, nil
	}
	if err := g.letIn(path); err != nil {
		l.Close()
		return nil, fmt.Errorf("control socket %s: %w", path, err)
	}
	return l, nil
}

// Inherit is Listen for a socket that the daemon's last process has made, and leaves
// to this one. f is closed.
func Inherit(f *os.File, path string) (net.Listener, error) {
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("control socket: descriptor %q does not listen: %w", f.Name(), err)
	}
	return &listener{Listener: l, path: path}, nil
}

// Duplicate returns a duplicate of a control socket for the daemon's next process,
// and whether the socket is the daemon's own: the next process calls Inherit then,
// else ListenFile.
func Duplicate(l net.Listener) (f *os.File, own bool, err error) {
	o, own := l.(*listener)
	if own {
		l = o.Listener
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, own, fmt.Errorf("control socket: %T has no descriptor", l)
	}
	f, err = u.File()
	return f, own, err
}

// Leave makes Close leave the socket's name, which is the next process's.
func Leave(l net.Listener) {
	if o, own := l.(*listener); own {
		o.once.Do(func() {})
	}
}

// listener removes the socket by its real path, since addr may go through a
// descriptor that is closed by then. It does so once, and while it listens:
// afterwards the path may be another daemon's.
type listener struct {
	net.Listener
	path string
	once sync.Once
}

func (l *listener) Close() error {
	l.once.Do(func() { os.Remove(l.path) })
	return l.Listener.Close()
}

// NewServer returns a gRPC server that keeps errnos and spells names; register a daemon's
// implementation with RegisterServer or RegisterClient and call Serve. Calls
// pass through around, in order.
func NewServer(around ...grpc.UnaryServerInterceptor) *grpc.Server {
	return grpc.NewServer(grpc.Creds(callerCredentials{}), grpc.ChainUnaryInterceptor(append([]grpc.UnaryServerInterceptor{keepErrno, spellNames}, around...)...))
}

// conn dials path. It connects at once, so that a missing daemon is reported by
// this call and not by a later one.
func conn(ctx context.Context, path string) (*grpc.ClientConn, error) {
	dial := func(ctx context.Context, _ string) (net.Conn, error) { return dialUnix(ctx, path) }
	c, err := dial(ctx, "")
	if err != nil {
		return nil, fmt.Errorf("no daemon answers on %s: %w", path, err)
	}
	c.Close()
	return grpc.NewClient("passthrough:///rnbd",
		grpc.WithContextDialer(dial),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithChainUnaryInterceptor(restoreErrno, sendValid))
}

func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	if os.Geteuid() != 0 { // the daemon of another user could answer anything
		dir, err := private.Look(filepath.Dir(path))
		if err != nil {
			return nil, err
		}
		dir.Close()
	}
	return private.Dial(ctx, path)
}

// DialServer connects to a server daemon. The caller closes the connection.
func DialServer(ctx context.Context, path string) (controlpb.ServerDaemonClient, *grpc.ClientConn, error) {
	c, err := conn(ctx, path)
	if err != nil {
		return nil, nil, err
	}
	return controlpb.NewServerDaemonClient(c), c, nil
}

// DialClient connects to a client daemon. The caller closes the connection.
func DialClient(ctx context.Context, path string) (controlpb.ClientDaemonClient, *grpc.ClientConn, error) {
	c, err := conn(ctx, path)
	if err != nil {
		return nil, nil, err
	}
	return controlpb.NewClientDaemonClient(c), c, nil
}
