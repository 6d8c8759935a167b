// Command floor is a skeleton of the path of a request: the same processes, hand-overs
// and bytes, and no protocol. What it needs is a lower bound for every program with these
// processes on this machine.
//
//	floor -socket PATH [-size BYTES [-in-server] | -file PATH [-direct]] [-sums] [-datagrams] [-spin DURATION]
//	floor -ublk [-size BYTES [-in-server] | -file PATH [-direct]] [-sums] [-datagrams] [-spin DURATION]
//	floor -library [-size BYTES [-in-server] | -file PATH [-direct]] [-sums] [-datagrams] [-spin DURATION]
//
// The first serves one disk in memory at an NBD unix socket until a signal ends it:
//
//	NBD client -> unix socket -> front end -> ring -> client -> TCP -> server -> ring -> plugin
//
// The second serves it as a disk of the kernel's ublk driver, and prints the path of its
// node:
//
//	ublk driver -> front end -> ring -> client -> TCP -> server -> ring -> plugin
//
// The third makes load itself, as an application with the client library does. Orders
// are lines of standard input, its end ends the process:
//
//	goroutine -> ring -> pump of the process -> TCP -> server -> ring -> plugin
//
// Each process has one pump of package pump, which spins and sleeps by the rules of the
// product, and the rings are those of package shm, with its doorbells. A message on TCP
// is a header of the size of ours on the wire and the payload. With -datagrams it is UDP
// instead, in packets of 4 KiB as RoCE has them. There are no keys, checks, sessions,
// statistics, acknowledgements, or answers to errors: whatever is out of order ends the
// process. Checksums are there with -sums only. Files:
//
// main.go (processes), handshake.go (NBD), frontend.go, ublk.go, library.go and daemons.go
// (what the processes do), orders.go (loads of the library), stream.go and datagrams.go (a
// socket as a source of a pump), disk.go (a plugin with a file).
package main

import (
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

const (
	extent    = 1 << 20 // the largest request in bytes; each request in flight has so much of the arena
	extents   = 128     // requests in flight
	arenaSize = extents * extent
	entries   = 4096 // of a ring: more than pieces of all requests
)

// config is the command line.
type config struct {
	role, socket string
	size         int64
	piece        int // bytes of the largest request between client and server
	spin         time.Duration
	library      bool   // make load instead of serving NBD clients
	ublk         bool   // serve a disk of ublk instead of NBD clients
	number       uint   // of the ublk device
	file         string // the disk; empty: it is in memory
	direct       bool   // the file is read past the page cache
	inServer     bool   // the server has the disk, which is in memory, and the plugin nothing to do
	sums         bool   // messages between the daemons have checksums
	datagrams    bool   // the daemons speak UDP
}

// Descriptors of the children, in this order: ring, its two doorbells, arena, and of the
// two daemons the connection or the second ring.
const firstFD = 3

func main() {
	var c config
	flag.StringVar(&c.role, "role", "", "of a child: frontend, client, server or plugin")
	flag.StringVar(&c.socket, "socket", "", "path of the NBD unix socket")
	flag.Int64Var(&c.size, "size", 64<<20, "bytes of the disk")
	flag.IntVar(&c.piece, "piece", 124<<10, "bytes of the largest request between client and server, as the product cuts")
	flag.DurationVar(&c.spin, "spin", pump.DefaultSpin, "how long an idle pump looks for work before it sleeps; 0: not at all")
	flag.BoolVar(&c.library, "library", false, "make load as orders on standard input say")
	flag.BoolVar(&c.ublk, "ublk", false, "serve a disk of the kernel's ublk driver")
	flag.UintVar(&c.number, "number", 0, "of a child: number of the ublk device")
	flag.StringVar(&c.file, "file", "", "file or block device that the plugin serves instead of memory")
	flag.BoolVar(&c.direct, "direct", false, "read the file past the page cache")
	flag.BoolVar(&c.inServer, "in-server", false, "keep the disk in memory of the server, which spares the hand-overs to the plugin")
	flag.BoolVar(&c.sums, "sums", false, "give each message between the daemons a CRC32C, as the product's default fabric does")
	flag.BoolVar(&c.datagrams, "datagrams", false, "send packets of UDP between the daemons instead of a stream of TCP")
	flag.Parse()
	if err := c.run(); err != nil {
		fmt.Fprintf(os.Stderr, "floor %s: %v\n", c.role, err)
		os.Exit(1)
	}
}

func (c config) run() error {
	switch c.role {
	case "frontend":
		if c.ublk {
			return runUblk(c)
		}
		return runFrontend(c)
	case "client":
		return runClient(c)
	case "server":
		return runServer(c)
	case "plugin":
		return runPlugin(c)
	}
	return c.start()
}

// child is a process and its descriptors.
type child struct {
	role string
	fds  []*os.File
}

// start starts the children, and waits for a signal or makes load.
func (c config) start() error {
	runtime.LockOSThread() // the children end with the thread that has started them
	far, err := newShared("far")
	if err != nil {
		return err
	}
	connect := connection
	if c.datagrams {
		connect = datagramSockets
	}
	toServer, toClient, err := connect()
	if err != nil {
		return err
	}
	// Both ends stay open in this process until it ends: the pump of -library still looks at
	// its own, and would take a closed one for a failure.
	defer runtime.KeepAlive([]*os.File{toServer, toClient})
	if c.ublk {
		number, err := c.addUblk()
		if err != nil {
			return err
		}
		defer delUblk(number) // after its server
		c.number = uint(number)
	}
	children := []child{{"plugin", far}, {"server", append(far[:4:4], toClient)}}
	if !c.library {
		near, err := newShared("near")
		if err != nil {
			return err
		}
		children = append(children, child{"client", append(near[:4:4], toServer)}, child{"frontend", near})
	}
	for _, child := range children {
		stop, err := c.spawn(child)
		if err != nil {
			return err
		}
		defer stop()
	}
	if c.library {
		return runLibrary(c, int(toServer.Fd()))
	}
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
	return nil
}

// spawn starts a child, and returns a function that ends it.
func (c config) spawn(child child) (stop func(), err error) {
	cmd := exec.Command(os.Args[0], "-role", child.role, "-socket", c.socket, "-size", fmt.Sprint(c.size), "-piece", fmt.Sprint(c.piece),
		"-spin", c.spin.String(), "-file", c.file, fmt.Sprintf("-direct=%t", c.direct), fmt.Sprintf("-sums=%t", c.sums),
		fmt.Sprintf("-ublk=%t", c.ublk), "-number", fmt.Sprint(c.number), fmt.Sprintf("-in-server=%t", c.inServer), fmt.Sprintf("-datagrams=%t", c.datagrams))
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = child.fds, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", child.role, err)
	}
	return func() {
		cmd.Process.Kill()
		cmd.Wait()
	}, nil
}

// newPump makes the pump of a process.
func (c config) newPump(name string) (*pump.Pump, error) {
	spin := c.spin
	if spin == 0 {
		spin = -1
	}
	return pump.New(pump.Config{Name: name, Spin: spin})
}

// newShared makes a ring and an arena, and returns their descriptors.
func newShared(name string) (files []*os.File, err error) {
	ring, err := shm.NewRing(entries)
	if err != nil {
		return nil, err
	}
	arena, err := shm.NewArena(name, arenaSize)
	if err != nil {
		return nil, err
	}
	mem, sq, cq := ring.FDs()
	for _, fd := range []int{mem, sq, cq, arena.FD()} {
		files = append(files, os.NewFile(uintptr(fd), name))
	}
	return files, nil
}

// connection returns both ends of a TCP connection on loopback, which do not delay.
func connection() (a, b *os.File, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	defer l.Close()
	dialled, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		return nil, nil, err
	}
	accepted, err := l.Accept()
	if err != nil {
		return nil, nil, err
	}
	if a, err = dialled.(*net.TCPConn).File(); err == nil {
		b, err = accepted.(*net.TCPConn).File()
	}
	return a, b, err
}

// opened is what a child has from its parent.
type opened struct {
	ring  *shm.Ring
	arena []byte
}

func open() (o opened, err error) {
	for fd := firstFD; fd < firstFD+5; fd++ {
		unix.CloseOnExec(fd)
	}
	for _, bell := range []int{firstFD + 1, firstFD + 2} {
		if err := unix.SetNonblock(bell, true); err != nil {
			return o, err
		}
	}
	if o.ring, err = shm.OpenRing(firstFD, firstFD+1, firstFD+2); err != nil {
		return o, err
	}
	arena, err := shm.OpenArena(firstFD+3, arenaSize)
	if err != nil {
		return o, err
	}
	o.arena = arena.Bytes()
	return o, nil
}

// serve runs a pump with these sources on this thread.
func serve(p *pump.Pump, sources ...pump.Source) error {
	pump.SetProcs(1)
	for _, s := range sources {
		if err := p.Add(s); err != nil {
			return err
		}
	}
	return p.Run(func() bool { return false })
}
