package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	goplugin "github.com/hashicorp/go-plugin"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// The handshake. The cookie only tells a plugin that a host started it; it is
// no secret.
const (
	cookieKey   = "RNBD_PLUGIN"
	cookieValue = "4e1f5d0f1c0b4b6fa3d2c5f1b9a7e6d3"
	setName     = "rnbd"
	controlFD   = 3
)

// lastLinesTime is for the last lines of the log of a plugin that ends.
const lastLinesTime = 100 * time.Millisecond

// hostGone is how long a plugin may take to end after its host has died.
const hostGone = 700 * time.Millisecond

func handshake() goplugin.HandshakeConfig {
	return goplugin.HandshakeConfig{MagicCookieKey: cookieKey, MagicCookieValue: cookieValue}
}

// grpcPlugin ties our services to go-plugin's server and client.
type grpcPlugin struct {
	goplugin.NetRPCUnsupportedPlugin
	server *server
}

func (p *grpcPlugin) GRPCServer(_ *goplugin.GRPCBroker, g *grpc.Server) error {
	p.server.register(g)
	return nil
}

func (p *grpcPlugin) GRPCClient(_ context.Context, _ *goplugin.GRPCBroker, c *grpc.ClientConn) (any, error) {
	return c, nil
}

// ServeIO is the main function of an io plugin. It does not return.
func ServeIO(b Backend) { serve(b, b.Describe(), ours) }

// ServeFrontend is the main function of a front-end plugin. It does not
// return.
func ServeFrontend(f Frontend) { serve(f, f.Describe(), ours) }

// StartedByHost reports whether this process was started as a plugin. The
// TestMain of a test binary that is its own plugin calls it.
func StartedByHost() bool { return os.Getenv(cookieKey) == cookieValue }

// versions are the versions that a plugin speaks; tests use others than ours.
type versions struct {
	protocol int
	ring     uint32
}

var ours = versions{protocol: ProtocolVersion, ring: RingVersion}

func serve(author any, info Info, v versions) {
	conn, err := adopt()
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", filepath.Base(os.Args[0]), err)
		os.Exit(1)
	}
	setComm(filepath.Base(os.Args[0]))
	lines := logs.Stderr(newLogHandler)
	log := slog.New(lines.Handler())
	slog.SetDefault(log)
	quiet()
	selfstats.Start(log)
	s := newServer(author, info, log, newFDReceiver(conn))
	s.procs = setProcs
	s.ringVersion = v.ring
	s.fail = func(err error) {
		log.Error("plugin cannot go on", "err", err)
		lines.Flush(lastLinesTime)
		os.Exit(1)
	}
	go func() {
		code := s.watch()
		lines.Flush(lastLinesTime)
		os.Exit(code)
	}()
	goplugin.Serve(&goplugin.ServeConfig{
		HandshakeConfig:  handshake(),
		VersionedPlugins: map[int]goplugin.PluginSet{v.protocol: {setName: &grpcPlugin{server: s}}},
		GRPCServer:       newGRPC,
		Logger:           newHclog(log, func() []any { return nil }),
	})
	os.Exit(0)
}

// setComm names the main thread, and so the process in lists: an executable that
// was started by its descriptor has a number for a name. Linux keeps 15 bytes.
func setComm(name string) {
	if p, err := syscall.BytePtrFromString(name); err == nil {
		_ = unix.Prctl(unix.PR_SET_NAME, bytePointer(p), 0, 0, 0)
	}
}

// adopt takes over the descriptors that the host has left open.
func adopt() (*net.UnixConn, error) {
	if !StartedByHost() {
		return nil, errors.New("this is an rnbd plugin, not a command: it is started by `rnbd server run` or `rnbd client run`, " +
			"which find it in their plugin directory")
	}
	unix.CloseOnExec(controlFD)
	conn, err := sockpair.Conn(os.NewFile(controlFD, "host control"))
	if err != nil {
		return nil, fmt.Errorf("descriptor %d is not the host's control socket: %w", controlFD, err)
	}
	return conn, nil
}

// quiet leaves the end of the process to the host: a signal to the whole group
// (systemd's stop, ctrl-C) must not kill a plugin that is still drained, nor a
// log line that the dead host does not read. A core dump would hold the fence
// until it is written.
func quiet() {
	signal.Ignore(syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGPIPE)
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
}

// watch returns the exit code of this process when its host is gone, or ends the process
// after hostGone.
func (s *server) watch() int {
	err := s.fds.run()
	if err != nil {
		s.log.Error("control socket", "err", err)
	}
	code := 0
	if !s.isDetached() {
		s.log.Warn("the host is gone")
		code = 1
		time.AfterFunc(hostGone, func() { os.Exit(code) })
		_ = s.detach(context.Background())
	}
	return code
}

func (s *server) isDetached() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.detached
}

// oneConn is a listener of a connection that is there already.
type oneConn struct {
	conn net.Conn
	once sync.Once
	done chan struct{}
}

func newOneConn(c net.Conn) *oneConn { return &oneConn{conn: c, done: make(chan struct{})} }

func (l *oneConn) Accept() (net.Conn, error) {
	var c net.Conn
	l.once.Do(func() { c = l.conn })
	if c != nil {
		return c, nil
	}
	<-l.done
	return nil, net.ErrClosed
}

func (l *oneConn) Close() error {
	select {
	case <-l.done:
	default:
		close(l.done)
	}
	return nil
}

func (l *oneConn) Addr() net.Addr { return l.conn.LocalAddr() }
