package control_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

type daemon struct {
	controlpb.UnimplementedClientDaemonServer
}

func (daemon) Unmap(ctx context.Context, r *controlpb.UnmapRequest) (*controlpb.Empty, error) {
	if r.Device == "slow" {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if r.Device == "busy" {
		return nil, fmt.Errorf("unmap %s: 2 connections are open: %w", r.Device, syscall.EBUSY)
	}
	return &controlpb.Empty{}, nil
}

func serve(t *testing.T, path string) controlpb.ClientDaemonClient {
	t.Helper()
	l, err := control.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	s := control.NewServer()
	controlpb.RegisterClientDaemonServer(s, daemon{})
	go s.Serve(l)
	t.Cleanup(s.Stop)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	c, conn, err := control.DialClient(ctx, path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return c
}

func TestErrnoArrives(t *testing.T) {
	c := serve(t, filepath.Join(t.TempDir(), "d", "client.sock"))
	_, err := c.Unmap(t.Context(), &controlpb.UnmapRequest{Device: "busy"})
	if !errors.Is(err, syscall.EBUSY) || blk.ToErrno(err) != blk.EBUSY {
		t.Fatalf("got %v, want EBUSY in the chain", err)
	}
	if !strings.Contains(err.Error(), "2 connections are open") {
		t.Fatalf("the daemon's words are lost: %v", err)
	}
	if _, err := c.Unmap(t.Context(), &controlpb.UnmapRequest{Device: "free"}); err != nil {
		t.Fatal(err)
	}
}

func TestCausesArrive(t *testing.T) {
	c := serve(t, filepath.Join(t.TempDir(), "client.sock"))
	_, err := c.Unmap(t.Context(), &controlpb.UnmapRequest{Device: "busy"})
	got := strings.Join(control.Causes(fmt.Errorf("try: %w", err)), "|")
	if want := "try|unmap busy: 2 connections are open|device or resource busy"; got != want {
		t.Errorf("causes are %q, want %q", got, want)
	}
}

func TestChainsAreTakenApart(t *testing.T) {
	a, b := errors.New("a"), fmt.Errorf("b: %w", syscall.ENOENT)
	for want, err := range map[string]error{
		"":                                nil,
		"a":                               a,
		"x|a":                             fmt.Errorf("x: %w", a),
		"x|b|no such file or directory":   fmt.Errorf("x: %w", b),
		"a|b|no such file or directory":   fmt.Errorf("%w: %w", a, b),
		"x|a|b|no such file or directory": fmt.Errorf("x: %w: %w", a, b),
		"a|a":                             errors.Join(a, a),
		"a in the middle":                 fmt.Errorf("%w in the middle", a),
	} {
		if got := strings.Join(control.Causes(err), "|"); got != want {
			t.Errorf("%v is taken apart to %q, want %q", err, got, want)
		}
	}
}

// TestDaemonThatHangsUp accepts connections and says nothing that gRPC knows.
func TestDaemonThatHangsUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "client.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	c, conn, err := control.DialClient(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_, err = c.Info(t.Context(), &controlpb.InfoRequest{})
	if !errors.Is(err, syscall.ENOTCONN) || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("got %v", err)
	}
}

func TestDaemonThatIsSlow(t *testing.T) {
	c := serve(t, filepath.Join(t.TempDir(), "client.sock"))
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := c.Unmap(ctx, &controlpb.UnmapRequest{Device: "slow"})
	if !errors.Is(err, syscall.ETIMEDOUT) || !strings.Contains(err.Error(), "in the time allowed") {
		t.Fatalf("got %v", err)
	}
}

func TestPathTooLongForAUnixAddress(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 100), strings.Repeat("e", 100))
	c := serve(t, filepath.Join(dir, "client.sock"))
	if _, err := c.Unmap(t.Context(), &controlpb.UnmapRequest{}); err != nil {
		t.Fatal(err)
	}
}

func TestSocketIsPrivate(t *testing.T) {
	path := filepath.Join(t.TempDir(), "client.sock")
	serve(t, path)
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Fatalf("mode %v, %v; want 0600", st.Mode(), err)
	}
}

func TestTwoDaemonsOnOneSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "client.sock")
	serve(t, path)
	if _, err := control.Listen(path); !errors.Is(err, syscall.EADDRINUSE) {
		t.Fatalf("got %v, want EADDRINUSE", err)
	}
}

// Of daemons that find the socket of a dead one at the same time one gets it.
func TestManyDaemonsAtOnce(t *testing.T) {
	for range 50 {
		path := filepath.Join(t.TempDir(), "client.sock")
		stale(t, path)
		var won atomic.Int32
		var all sync.WaitGroup
		begin := make(chan struct{})
		for range 8 {
			all.Go(func() {
				<-begin
				l, err := control.Listen(path)
				if err == nil {
					won.Add(1)
					t.Cleanup(func() { l.Close() })
				} else if !errors.Is(err, syscall.EADDRINUSE) {
					t.Errorf("got %v, want EADDRINUSE", err)
				}
			})
		}
		close(begin)
		all.Wait()
		if n := won.Load(); n != 1 {
			t.Fatalf("%d of 8 have the socket", n)
		}
	}
}

// stale makes the socket of a daemon that was killed.
func stale(t *testing.T, path string) {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Close(fd)
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}); err != nil {
		t.Fatal(err)
	}
}

func TestStaleSocketIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "client.sock")
	stale(t, path)
	serve(t, path)
}

func TestFileInTheWay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "client.sock")
	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := control.Listen(path); !errors.Is(err, syscall.EEXIST) {
		t.Fatalf("got %v, want EEXIST", err)
	}
	if b, _ := os.ReadFile(path); string(b) != "mine" {
		t.Fatal("the file was touched")
	}
}

// A folder that somebody else has made, or can change, is not used.
func TestFolderOfOthers(t *testing.T) {
	open, link := filepath.Join(t.TempDir(), "open"), filepath.Join(t.TempDir(), "link")
	if err := os.Mkdir(open, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Chmod(open, 0o777), os.Symlink(t.TempDir(), link)); err != nil {
		t.Fatal(err)
	}
	for name, x := range map[string]struct {
		dir  string
		want error
	}{
		"everybody can write to it": {open, syscall.EPERM},
		"it is a link":              {link, syscall.ENOTDIR},
	} {
		l, err := control.Listen(filepath.Join(x.dir, "client.sock"))
		if !errors.Is(err, x.want) {
			t.Errorf("%s: got %v, want %v", name, err, x.want)
		}
		if err == nil {
			l.Close()
		}
	}
}

func TestNoDaemon(t *testing.T) {
	_, _, err := control.DialClient(t.Context(), filepath.Join(t.TempDir(), "client.sock"))
	if err == nil || !strings.Contains(err.Error(), "no daemon answers on") {
		t.Fatalf("got %v", err)
	}
}

// A daemon that ends closes its listener twice: with its API, and at the end.
// Meanwhile another may listen there.
func TestClosingTwiceLeavesTheSocketOfTheNextDaemon(t *testing.T) {
	path := filepath.Join(t.TempDir(), "server.sock")
	first, err := control.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is still there: %v", err)
	}
	next, err := control.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	first.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the socket of the next daemon is gone: %v", err)
	}
}

// The socket goes on with the daemon's next process: its name stays, callers wait, and
// the last listener removes it.
func TestSocketOfTheNextProcess(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d", "client.sock")
	old, err := control.Listen(path)
	if err != nil {
		t.Fatal(err)
	}
	f, own, err := control.Duplicate(old)
	if err != nil || !own {
		t.Fatalf("own %t, %v", own, err)
	}
	control.Leave(old)
	old.Close()
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("callers are refused: %v", err)
	}
	defer c.Close()
	next, err := control.Inherit(f, path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := next.Accept(); err != nil {
		t.Fatal(err)
	}
	next.Close()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the name is left: %v", err)
	}
}
