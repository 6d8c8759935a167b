package lab

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Lab is a folder with daemons in it.
type Lab struct {
	Dir  string // short, so that unix sockets fit
	Bin  string
	n    int
	stop []func() error
}

// Open makes a lab. Close ends its processes and removes the folder.
func Open() (*Lab, error) {
	bin, err := Bin()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "rnbd-lab-")
	if err != nil {
		return nil, err
	}
	return &Lab{Dir: dir, Bin: bin}, nil
}

// Close ends all daemons, the last started first.
func (l *Lab) Close() error {
	var first error
	for i := len(l.stop) - 1; i >= 0; i-- {
		if err := l.stop[i](); err != nil && first == nil {
			first = err
		}
	}
	l.stop = nil
	UnmountBelow(l.Dir) // what a killed daemon has left
	if err := os.RemoveAll(l.Dir); err != nil && first == nil {
		first = err
	}
	return first
}

// ServerOptions say how to run a server. Extra goes to its command line.
type ServerOptions struct {
	SearchPath string
	// NoBlockDevices is set if a server without SearchPath does not serve all block devices.
	NoBlockDevices bool
	Addrs          []string // of IPv4, default 127.0.0.1; ports are chosen
	Listen         []string // where the server listens, as --listen has it; instead of Addrs
	Plugins        []string // NAME of a binary io-NAME; default fileio and blockio
	Extra          []string
	Env            []string
	Prefix         []string // a program that runs the server, as prlimit
	Sys            string   // folder for control files; empty: none
}

// Server is a running server daemon.
type Server struct {
	process
	Socket string
	Addrs  []string // address:port of each listener
	API    controlpb.ServerDaemonClient
	conn   *grpc.ClientConn
	extra  int // arguments at the end that are ServerOptions.Extra
}

// StartServer runs a server and waits until it answers.
func (l *Lab) StartServer(o ServerOptions) (*Server, error) {
	l.n++
	name := "server" + strconv.Itoa(l.n)
	s := &Server{Socket: filepath.Join(l.Dir, name+".sock")}
	args := []string{"server", "run", "--socket", s.Socket, "--plugin-dir", l.Bin, "--sys", o.Sys}
	if o.SearchPath != "" {
		args = append(args, "--search-path", o.SearchPath)
	} else if !o.NoBlockDevices {
		args = append(args, "--block-devices", "/dev/*", "--block-devices", "/dev/*/*")
	}
	if len(o.Addrs) == 0 && len(o.Listen) == 0 {
		o.Addrs = []string{"127.0.0.1"}
	}
	for _, a := range o.Listen {
		s.Addrs = append(s.Addrs, a)
		args = append(args, "--listen", a)
	}
	for _, a := range o.Addrs {
		addr, release, err := reserve(a)
		if err != nil {
			return nil, fmt.Errorf("reserve a port of %s: %w", a, err)
		}
		l.stop = append(l.stop, release)
		s.Addrs = append(s.Addrs, addr)
		args = append(args, "--listen", addr)
	}
	for _, p := range o.Plugins {
		args = append(args, "--io-plugin", p+"="+filepath.Join(l.Bin, "io-"+p))
	}
	for _, p := range []string{"blockio", "fileio"} {
		if len(o.Plugins) > 0 && !slices.Contains(o.Plugins, p) {
			args = append(args, "--io-plugin", p+"=none")
		}
	}
	s.process, s.extra = l.daemon(name, o.Prefix, append(args, o.Extra...), o.Env), len(o.Extra)
	l.stop = append(l.stop, s.Stop)
	return s, s.Start()
}

// Start runs the server again after Kill or Stop, at the same addresses.
func (s *Server) Start() error {
	if err := s.start(); err != nil {
		return err
	}
	return s.awaitAPI()
}

// Upgrade has the server hand over to another process of a binary, empty for its
// own. The Server is that process then.
func (s *Server) Upgrade(binary string) (*controlpb.UpgradeReply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*Patience)
	defer cancel()
	reply, err := s.API.Upgrade(ctx, &controlpb.UpgradeRequest{Binary: binary, ReadyUs: Patience.Microseconds()})
	if err != nil {
		return nil, err
	}
	if err := s.adopt(int(reply.Pid)); err != nil {
		return nil, err
	}
	s.conn.Close()
	return reply, s.awaitAPI()
}

func (s *Server) awaitAPI() error {
	return s.await(func(ctx context.Context) (err error) {
		if s.API, s.conn, err = control.DialServer(ctx, s.Socket); err != nil {
			return err
		}
		if _, err = s.API.Info(ctx, &controlpb.InfoRequest{}); err != nil {
			s.conn.Close()
		}
		return err
	})
}

// Bin makes the server a program of another folder, with the plugins there. It counts
// from the next Start on.
func (s *Server) Bin(dir string) {
	was := filepath.Dir(s.path)
	s.path = filepath.Join(dir, "rnbd")
	for i, a := range s.args {
		s.args[i] = strings.ReplaceAll(a, was, dir)
	}
}

// Options replaces Extra in the command line; it counts from the next Start
// on.
func (s *Server) Options(extra ...string) {
	s.args = append(s.args[:len(s.args)-s.extra:len(s.args)-s.extra], extra...)
	s.extra = len(extra)
}

// Stop ends the server in order.
func (s *Server) Stop() error {
	if s.conn != nil {
		s.conn.Close()
		s.conn = nil
	}
	return s.end(syscall.SIGTERM, Patience)
}

// Kill ends it by SIGKILL.
func (s *Server) Kill() error { return s.end(syscall.SIGKILL, 10*time.Second) }

// Plugin returns the server's message about an io plugin.
func (s *Server) Plugin(name string) (*controlpb.Plugin, error) {
	info, err := s.API.Info(context.Background(), &controlpb.InfoRequest{})
	return findPlugin(info, name, err)
}

func findPlugin(info *controlpb.DaemonInfo, name string, err error) (*controlpb.Plugin, error) {
	if err != nil {
		return nil, err
	}
	for _, p := range info.Plugins {
		if p.Name == name {
			return p, nil
		}
	}
	return nil, fmt.Errorf("there is no plugin %q", name)
}

// KillPlugin ends the process of an io plugin by SIGKILL.
func (s *Server) KillPlugin(name string) error {
	p, err := s.Plugin(name)
	return killPlugin(p, err)
}

func killPlugin(p *controlpb.Plugin, err error) error {
	if err != nil {
		return err
	}
	if p.Pid == 0 {
		return fmt.Errorf("plugin %s is not running: %s", p.Name, p.State)
	}
	return syscall.Kill(int(p.Pid), syscall.SIGKILL)
}

// ClientOptions say how to run a client.
type ClientOptions struct {
	Frontend string // of mappings that name none; default nbd-socket: it works everywhere
	Extra    []string
	Env      []string
	Prefix   []string
	Sys      string // folder for control files; empty: none
	Held     bool   // the lab makes the sockets and keeps them, as the service manager does
}

// Client is a running client daemon.
type Client struct {
	process
	Socket string
	NBD    string // unix socket of the NBD front end
	Links  string // folder of links to device nodes
	API    controlpb.ClientDaemonClient
	conn   *grpc.ClientConn
}

// StartClient runs a client and waits until it answers.
func (l *Lab) StartClient(o ClientOptions) (*Client, error) {
	l.n++
	name := "client" + strconv.Itoa(l.n)
	c := &Client{Socket: filepath.Join(l.Dir, name+".sock"), NBD: filepath.Join(l.Dir, name+"-nbd.sock"), Links: filepath.Join(l.Dir, name+"-links")}
	args := []string{"client", "run", "--socket", c.Socket, "--plugin-dir", l.Bin, "--nbd-listen", "unix:" + c.NBD, "--sys", o.Sys}
	if o.Frontend == "" {
		o.Frontend = "nbd-socket"
	}
	args = append(args, "--frontend", o.Frontend, "--device-links", c.Links)
	if o.Held {
		o.Prefix = append([]string{"sh", "-c", `LISTEN_PID=$$ exec "$@"`, "sh"}, o.Prefix...)
		o.Env = append(o.Env, "LISTEN_FDS=2", "LISTEN_FDNAMES=control:nbd")
	}
	c.process = l.daemon(name, o.Prefix, append(args, o.Extra...), o.Env)
	if o.Held {
		if err := l.hold(&c.process, c.Socket, c.NBD); err != nil {
			return c, err
		}
	}
	l.stop = append(l.stop, c.Stop)
	return c, c.Start()
}

// hold makes unix sockets that p inherits, and keeps them until the lab is closed.
func (l *Lab) hold(p *process, paths ...string) error {
	for _, path := range paths {
		s, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		if err != nil {
			return err
		}
		f, err := s.File()
		if err != nil {
			return err
		}
		p.files = append(p.files, f)
		l.stop = append(l.stop, func() error { f.Close(); return s.Close() })
	}
	return nil
}

// Start runs the client again after Kill or Stop.
func (c *Client) Start() error {
	if err := c.start(); err != nil {
		return err
	}
	return c.awaitAPI()
}

// Upgrade has the client hand over to another process of a binary, empty for its own.
// The Client is that process then.
func (c *Client) Upgrade(binary string) (*controlpb.UpgradeReply, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*Patience)
	defer cancel()
	reply, err := c.API.Upgrade(ctx, &controlpb.UpgradeRequest{Binary: binary, ReadyUs: Patience.Microseconds()})
	if err != nil {
		return nil, err
	}
	if err := c.adopt(int(reply.Pid)); err != nil {
		return nil, err
	}
	c.conn.Close()
	return reply, c.awaitAPI()
}

// Follow makes the Client the process that serves its control socket now, after an
// upgrade by other means.
func (c *Client) Follow() error {
	c.conn.Close()
	if err := c.awaitAPI(); err != nil {
		return err
	}
	info, err := c.API.Info(context.Background(), &controlpb.InfoRequest{})
	if err != nil {
		return err
	}
	return c.adopt(int(info.Pid))
}

func (c *Client) awaitAPI() error {
	return c.await(func(ctx context.Context) (err error) {
		if c.API, c.conn, err = control.DialClient(ctx, c.Socket); err != nil {
			return err
		}
		if _, err = c.API.Info(ctx, &controlpb.InfoRequest{}); err != nil {
			c.conn.Close()
		}
		return err
	})
}

// Stop ends the client in order.
func (c *Client) Stop() error {
	if c.conn != nil {
		c.conn.Close()
		c.conn = nil
	}
	return c.end(syscall.SIGTERM, Patience)
}

// Kill ends it by SIGKILL.
func (c *Client) Kill() error { return c.end(syscall.SIGKILL, 10*time.Second) }

// Plugin returns the client's message about a front end.
func (c *Client) Plugin(name string) (*controlpb.Plugin, error) {
	info, err := c.API.Info(context.Background(), &controlpb.InfoRequest{})
	return findPlugin(info, name, err)
}

// KillPlugin ends the process of a front end by SIGKILL.
func (c *Client) KillPlugin(name string) error {
	p, err := c.Plugin(name)
	return killPlugin(p, err)
}

// Map maps path over all addresses of s, read-write, with changes to the
// request by with.
func (c *Client) Map(path string, s *Server, with ...func(*controlpb.MapRequest)) (*controlpb.ClientDevice, error) {
	r := &controlpb.MapRequest{Path: path, Paths: s.Addrs}
	for _, f := range with {
		f(r)
	}
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	return c.API.Map(ctx, r)
}

// Unmap takes a device away.
func (c *Client) Unmap(device string, force bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	_, err := c.API.Unmap(ctx, &controlpb.UnmapRequest{Device: device, Force: force})
	return err
}

// Device returns the client's message about a device.
func (c *Client) Device(name string) (*controlpb.ClientDevice, error) {
	l, err := c.API.ListDevices(context.Background(), &controlpb.ListRequest{})
	if err != nil {
		return nil, err
	}
	for _, d := range l.Devices {
		if d.Name == name {
			return d, nil
		}
	}
	return nil, fmt.Errorf("there is no device %q", name)
}

// URI is where NBD clients find a device, in the form that they agree on.
func (c *Client) URI(device string) string { return "nbd+unix:///" + device + "?socket=" + c.NBD }

func (l *Lab) daemon(name string, prefix, args, env []string) process {
	argv := append(append([]string{}, prefix...), filepath.Join(l.Bin, "rnbd"))
	argv = append(argv, args...)
	return process{log: filepath.Join(l.Dir, name+".log"), path: argv[0], args: argv[1:], env: env}
}

// Patience bounds the start of a daemon, its end and calls to it. An emulated
// machine needs more.
var Patience = 30 * time.Second

// await tries ask until it works or the process ends.
func (p *process) await(ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	for {
		err := ask(ctx)
		if err == nil {
			return nil
		}
		if gone, _ := p.Exited(); gone {
			return fmt.Errorf("%s ended: %s", p.path, lastLines(p.Log(), 5))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer: %w\n%s", p.path, err, lastLines(p.Log(), 20))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func lastLines(s string, n int) string {
	lines := strings.Split(strings.TrimSpace(s), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// reserve finds a free port of an address and keeps it until release, also while
// its server is away. The socket is bound and does not listen: connections are
// refused, and a server that asks for this port, with SO_REUSEADDR, gets it.
func reserve(host string) (addr string, release func() error, err error) {
	ip, err := netip.ParseAddr(host)
	if err != nil {
		return "", nil, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, err
	}
	err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	if err == nil {
		err = unix.Bind(fd, &unix.SockaddrInet4{Addr: ip.As4()})
	}
	var bound unix.Sockaddr
	if err == nil {
		bound, err = unix.Getsockname(fd)
	}
	if err != nil {
		unix.Close(fd)
		return "", nil, err
	}
	port := bound.(*unix.SockaddrInet4).Port
	return netip.AddrPortFrom(ip, uint16(port)).String(), func() error { return unix.Close(fd) }, nil
}

// LoopbackAddr is the n-th loopback address of this process alone, for fabrics
// with a fixed port: RoCEv2.
func LoopbackAddr(n byte) string {
	pid := os.Getpid()
	return fmt.Sprintf("127.%d.%d.%d", 128|pid>>8&0x3f, pid&0xff, n)
}
