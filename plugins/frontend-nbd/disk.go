package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// A kernelDisk is an export that is attached to the kernel's NBD client as
// /dev/nbdN. The kernel gets one end of a socket pair; the other end is a
// connection like any other, without a handshake.
//
// When a request takes longer than the time-out, the kernel gives up its
// connection and sends the request again on another one. The first copy is
// still in flight and must not overwrite data that is written after the second.
// With one connection the kernel waits for a new one, and gets it when every
// request of the old one has ended. With several connections, claims.exclusive
// holds a write back while a write of the same blocks is with the device, and
// queue.submit drops a write of a connection that has been given up.

const (
	defaultTimeout = 30 * time.Second
	deadTime       = time.Hour // the time requests wait for the next process or daemon
	adoptTime      = 10 * time.Second
	maxPerDisk     = 16 // connections
)

// diskSettings are those of a device.
type diskSettings struct {
	attach      string // auto, yes, no
	number      int    // N of /dev/nbdN; -1: any
	timeout     time.Duration
	connections int // of the kernel
	queues      int // the most that may serve the export
}

func parseSettings(in map[string]string) (diskSettings, error) {
	s := diskSettings{attach: "no", number: -1, timeout: defaultTimeout, connections: 1, queues: math.MaxInt}
	for k, v := range in {
		n, err := strconv.ParseUint(v, 10, 20)
		switch {
		case k == "attach" && (v == "auto" || v == "yes" || v == "no"):
			s.attach = v
		case k == "number" && err == nil:
			s.number = int(n)
		case k == "timeout" && err == nil && n > 0:
			s.timeout = time.Duration(n) * time.Second
		case k == "connections" && err == nil && n > 0 && n <= maxPerDisk:
			s.connections = int(n)
		case k == "queues" && err == nil && n > 0:
			s.queues = int(n)
		default:
			return s, fmt.Errorf("setting %s=%q: there are attach (auto, yes, no), number (the N of /dev/nbdN), timeout (seconds), connections (1 to %d), queues (at most): %w", k, v, maxPerDisk, blk.EINVAL)
		}
	}
	return s, nil
}

type kernelDisk struct {
	f      *frontend
	exp    *export
	kernel kernelClient
	log    *slog.Logger
	config diskConfig // of the disk; index is the number that was asked for
	conns  int        // connections of the disk; a lost one is replaced

	mu      sync.Mutex
	index   int  // N of /dev/nbdN; -1: none yet
	leaving bool // no new connection
	ended   bool // the kernel has disconnected it
}

func nodePath(index int) string { return "/dev/nbd" + strconv.Itoa(index) }

// indexOf is the inverse of nodePath.
func indexOf(path string) (int, bool) {
	digits, ok := strings.CutPrefix(path, "/dev/nbd")
	n, err := strconv.ParseUint(digits, 10, 20)
	return int(n), ok && err == nil
}

func (d *kernelDisk) devicePath() string { return nodePath(d.deviceNumber()) }

func (d *kernelDisk) deviceNumber() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.index
}

func (d *kernelDisk) setNumber(index int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.index = index
}

// attachDisk makes e a disk if its settings ask for it. It returns nil, nil if e
// stays an export only: with attach=no, or with attach=auto where the kernel's
// NBD client cannot be used.
func (f *frontend) attachDisk(ctx context.Context, e *export, s *plugin.DeviceSpec) (*kernelDisk, error) {
	set, err := parseSettings(s.Config)
	if err != nil || set.attach == "no" {
		return nil, err
	}
	size, flags := e.geometry()
	d := &kernelDisk{index: -1, f: f, exp: e, kernel: f.kernel, log: f.log().With("export", e.name), config: diskConfig{
		index: set.number, size: size, block: e.block, flags: flags, withFlags: true,
		timeout: set.timeout, deadTime: deadTime, identity: s.Identity,
	}}
	if err := f.awaitQueues(ctx, s.Queues); err != nil {
		return nil, err
	}
	location, err := d.findNode(s.Location)
	if err != nil {
		return nil, err
	}
	taken, err := d.takeOverAt(ctx, location)
	if err != nil {
		return nil, err
	}
	if !taken {
		err = d.connectDisk(set.connections)
	}
	if errors.Is(err, errNoKernel) && set.attach == "auto" {
		d.log.Info("no disk, an export alone", "cause", err)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	d.scanPartitions()
	return d, nil
}

// errNotOurs means that there is no disk of this daemon to take over.
var errNotOurs = errors.New("there is no disk of an earlier process")

// noDisk reports whether err is the kernel's answer for a disk that does not
// exist or belongs to another program. ENODEV means that the kernel has no NBD
// client, and so no disk.
func noDisk(err error) bool { return errors.Is(err, unix.EINVAL) || errors.Is(err, blk.ENODEV) }

// findNode returns the node of the disk of an earlier process. If the node is not
// known it is found by the backend identifier; the error wraps ENODEV if no
// disk has it.
func (d *kernelDisk) findNode(location string) (string, error) {
	if location != plugin.LocationUnknown {
		return location, nil
	}
	for _, index := range d.kernel.listDisks() {
		if mark, told := d.kernel.backendIdentity(index); told && mark == d.config.identity {
			return nodePath(index), nil
		}
	}
	return "", fmt.Errorf("no disk has the backend identifier %q: %w", d.config.identity, blk.ENODEV)
}

// takeOverAt takes over the disk of an earlier process, if there is one. On an
// error the disk is left as it is and can be tried again: it may be mounted,
// and its requests wait.
func (d *kernelDisk) takeOverAt(ctx context.Context, location string) (taken bool, err error) {
	index, ok := indexOf(location)
	if !ok {
		return false, nil
	}
	if err = d.checkBackend(index); err == nil {
		err = d.takeOver(ctx, index)
	}
	if errors.Is(err, errNotOurs) {
		d.log.Warn("disk is made anew", "path", location, "cause", err)
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("%s cannot be taken over yet, it is left as it is: %w", location, err)
	}
	return true, nil
}

// checkBackend returns an error if the disk's backend identifier shows that the disk
// belongs to another program. Where the kernel does not show identifiers it
// compares them itself, but accepts a disk without one.
func (d *kernelDisk) checkBackend(index int) error {
	if mark, told := d.kernel.backendIdentity(index); told && mark != d.config.identity {
		return fmt.Errorf("%w: %s has the backend identifier %q", errNotOurs, nodePath(index), mark)
	}
	return nil
}

// takeOver continues the disk of an earlier process. Its requests wait for new
// connections.
func (d *kernelDisk) takeOver(ctx context.Context, index int) error {
	d.setNumber(index)
	d.expectConns(d.kernel.queueCount(index))
	for i := range d.conns {
		err := d.reconnectDisk(ctx)
		if err != nil && i == 0 {
			d.setNumber(-1)
			return err
		}
		if err != nil {
			d.log.Warn("the disk has fewer connections than before", "path", d.devicePath(), "before", d.conns, "connections", i, "err", err)
			d.conns = i
			break
		}
	}
	d.log.Info("disk taken over", "path", d.devicePath(), "connections", d.conns)
	if err := d.resizeDisk(d.config.size); err != nil { // it may have changed since
		d.log.Warn("the disk keeps its size", "path", d.devicePath(), "wanted", d.config.size, "err", err)
	}
	return nil
}

// expectConns sets the number of connections before the kernel gets the first one.
func (d *kernelDisk) expectConns(n int) {
	d.conns = n
	d.exp.claims.exclusive.Store(n > 1)
}

// connectDisk makes the disk with n connections, or fewer if the kernel allows
// fewer.
func (d *kernelDisk) connectDisk(n int) error {
	d.expectConns(min(n, d.kernel.mostConnections()))
	ours, theirs, err := socketPairs(d.conns)
	if err != nil {
		return err
	}
	c := d.config
	c.sockets = theirs
	if d.conns == 1 {
		c.flags &^= nbdwire.CanMultiConn
	}
	index, err := d.kernel.sendCommand(nlConnect, &c)
	if err == nil && index < 0 {
		index = c.index
	}
	switch {
	case errors.Is(err, unix.EBUSY) && c.index >= 0:
		err = fmt.Errorf("%s is taken: %w", nodePath(c.index), err)
	case err == nil && index < 0:
		err = fmt.Errorf("the kernel's NBD client does not tell the disk's number: %w", blk.EIO)
	}
	if err != nil {
		closeAll(ours)
		return err
	}
	d.setNumber(index)
	for i, fd := range ours {
		if err := d.serveConn(fd); err != nil {
			closeAll(ours[i+1:])
			return errors.Join(err, d.disconnectDisk())
		}
	}
	d.log.Info("disk is ready", "path", d.devicePath(), "connections", d.conns)
	return nil
}

// reconnectDisk gives the disk a new connection in place of one that has ended. The
// kernel takes none before it has noticed the end, so reconnect retries.
func (d *kernelDisk) reconnectDisk(ctx context.Context) error {
	for end := time.Now().Add(adoptTime); ; {
		taken, err := d.offerConn()
		if taken || err != nil {
			return err
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return fmt.Errorf("%s does not take a new connection: %w", d.devicePath(), blk.EBUSY)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// offerConn offers the kernel a new connection and reports whether it was taken.
// The kernel reports no error if it needs none, but closes the socket.
func (d *kernelDisk) offerConn() (bool, error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return false, err
	}
	c := diskConfig{index: d.deviceNumber(), identity: d.config.identity, sockets: []int{theirs}}
	_, err = d.kernel.sendCommand(nlReconfigure, &c)
	if noDisk(err) {
		err = fmt.Errorf("%w: %w", errNotOurs, err)
	}
	if err != nil || hungUp(ours) {
		unix.Close(ours)
		return false, err
	}
	return true, d.serveConn(ours)
}

func socketPairs(n int) (ours, theirs []int, err error) {
	for range n {
		our, their, err := socketPair()
		if err != nil {
			closeAll(ours)
			closeAll(theirs)
			return nil, nil, err
		}
		ours, theirs = append(ours, our), append(theirs, their)
	}
	return ours, theirs, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

func socketPair() (ours, theirs int, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, fmt.Errorf("socket pair: %w", err)
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		unix.Close(fds[1])
		return -1, -1, err
	}
	return fds[0], fds[1], nil
}

// serveConn adds fd, the daemon's end of a socket pair, to a queue as a connection.
func (d *kernelDisk) serveConn(fd int) error {
	if !d.exp.acquireOwn() {
		unix.Close(fd)
		return errRemoved
	}
	sh := d.f.assignShare(d.exp)
	if sh == nil {
		d.exp.releaseOwn()
		unix.Close(fd)
		return fmt.Errorf("no queue to serve it: %w", blk.ENODEV)
	}
	c := newConn(fd, "kernel", handshakeResult{exp: d.exp}, sh)
	c.disk = d
	if !d.f.runOnQueue(sh.q, func() { sh.q.addConn(c) }) {
		d.exp.unassignShare(sh)
		d.exp.releaseOwn()
		unix.Close(fd)
		return errShutdown
	}
	return nil
}

// onConnLost is called by the queue when a connection is over and its last request
// has ended. Only from then on may the kernel send unanswered requests again.
func (d *kernelDisk) onConnLost() {
	d.exp.releaseOwn()
	d.mu.Lock()
	over := d.leaving || d.index < 0
	d.mu.Unlock()
	if over {
		return
	}
	go func() {
		d.log.Warn("the kernel has closed its connection, it gets another one", "path", d.devicePath())
		for {
			err := d.reconnectDisk(context.Background())
			if err == nil || errors.Is(err, errRemoved) || d.isLeaving() {
				return
			}
			over := errors.Is(err, errNotOurs) || errors.Is(err, errShutdown)
			d.log.Error("the disk has no connection", "path", d.devicePath(), "err", err, "tried_again", !over)
			if over {
				return
			}
			time.Sleep(lostPause)
		}
	}()
}

// lostPause is the pause between attempts to reconnect the disk.
const lostPause = time.Second

func (d *kernelDisk) isLeaving() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.leaving
}

// disconnectDisk disconnects the disk, once; requests of its users fail. Afterwards the
// number may belong to another disk.
func (d *kernelDisk) disconnectDisk() error {
	d.mu.Lock()
	d.leaving = true
	ended := d.ended
	d.mu.Unlock()
	if ended {
		return nil
	}
	_, err := d.kernel.sendCommand(nlDisconnect, &diskConfig{index: d.deviceNumber()})
	if err != nil && !errors.Is(err, syscall.EINVAL) { // EINVAL: it is gone
		return fmt.Errorf("disconnect %s: %w", d.devicePath(), err)
	}
	d.mu.Lock()
	d.ended = true
	d.mu.Unlock()
	return nil
}

func (d *kernelDisk) resizeDisk(size uint64) error {
	_, err := d.kernel.sendCommand(nlReconfigure, &diskConfig{index: d.deviceNumber(), identity: d.config.identity, size: size})
	if err != nil {
		return fmt.Errorf("resize %s: %w", d.devicePath(), err)
	}
	return nil
}

// scanPartitions opens the disk once: this makes the kernel look for partitions.
func (d *kernelDisk) scanPartitions() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if f, err := os.Open(d.devicePath()); err == nil {
			f.Close()
		}
	}()
	select {
	case <-done:
	case <-time.After(commandTime): // the reads wait; the scan continues in the background
	}
}
