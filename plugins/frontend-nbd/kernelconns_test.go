package main

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// newSeveralRig has a disk with two connections of the kernel, one for each queue.
func newSeveralRig(t *testing.T, k *fakeKernel, with ...func(*plugin.DeviceSpec)) *rig {
	t.Helper()
	r, err := newKernelRig(t, k, append(with, func(s *plugin.DeviceSpec) { s.Config["connections"] = "2" })...)
	must(t, "add", err)
	eventually(t, "a connection for each queue", func() bool { return r.ofKernel(0) != nil && r.ofKernel(1) != nil })
	return r
}

// ofKernel is the kernel's connection of queue i.
func (r *rig) ofKernel(i int) (found *conn) {
	r.onQueue(i, func(q *queue) {
		for _, c := range q.conns {
			if c.disk != nil {
				found = c
			}
		}
	})
	return found
}

func (r *rig) removeKernelDisk() {
	r.t.Helper()
	must(r.t, "remove", r.f.RemoveDevice(r.t.Context(), 1, true))
	delete(r.disks, 1)
}

// giveUp ends the connection of a late request as the kernel does.
func giveUp(t *testing.T, conn net.Conn) {
	t.Helper()
	must(t, "shut down", conn.(*net.UnixConn).CloseRead())
	must(t, "shut down", conn.(*net.UnixConn).CloseWrite())
}

const sentAt = 8192

func write4K(t testing.TB, conn net.Conn, n byte) {
	t.Helper()
	if _, err := conn.Write(append(command(nbdwire.CmdWrite, 0, uint64(n), sentAt, 4096), bytes.Repeat([]byte{n}, 4096)...)); err != nil {
		t.Fatal(err)
	}
}

func written(t *testing.T, conn net.Conn) {
	t.Helper()
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	reply := make([]byte, nbdwire.SimpleSize)
	if _, err := io.ReadFull(conn, reply); err != nil || reply[7] != 0 {
		t.Fatalf("reply % x, %v", reply, err)
	}
}

func TestKernelDisk_Several(t *testing.T) {
	k := &fakeKernel{}
	r := newSeveralRig(t, k)
	if len(k.commands) != 1 || len(k.configs[0].sockets) != 2 || k.configs[0].flags&nbdwire.CanMultiConn == 0 {
		t.Fatalf("the kernel is told %d %+v", k.commands, k.configs)
	}
	kernelIO(t, k.conn(0), 1)
	kernelIO(t, k.conn(1), 2)
	giveUp(t, k.conn(0))
	eventually(t, "new connection", func() bool { return k.conn(2) != nil })
	kernelIO(t, k.conn(1), 3)
	kernelIO(t, k.conn(2), 4)
	if n := r.f.exportAt(1).openerCount(); n != 0 {
		t.Errorf("the kernel's own connections count as %d users", n)
	}
	r.removeKernelDisk()
}

// A disk of an earlier process has as many connections as it had.
func TestKernelDisk_SeveralTakenOver(t *testing.T) {
	k := &fakeKernel{busy: 2, had: 3}
	r := newSeveralRig(t, k, func(s *plugin.DeviceSpec) { s.Location = "/dev/nbd9" })
	for i := range 3 {
		kernelIO(t, k.conn(i), byte(i))
	}
	if k.conn(3) != nil || !r.f.exportAt(1).claims.exclusive.Load() {
		t.Error("not as the disk was")
	}
	r.removeKernelDisk()
}

func TestKernelDisk_SeveralAndFewProcessors(t *testing.T) {
	k := &fakeKernel{}
	r, err := newKernelRig(t, k, func(s *plugin.DeviceSpec) { s.Config["connections"] = "16" })
	must(t, "add", err)
	if n := len(k.configs[0].sockets); n != k.mostConnections() {
		t.Errorf("%d connections", n)
	}
	r.removeKernelDisk()
}

// A request that the kernel sends again while the first is with the device
// waits for it: else the first could overwrite later data.
func TestKernelDisk_SentAgainWaitsForTheFirst(t *testing.T) {
	k := &fakeKernel{}
	r := newSeveralRig(t, k)
	e := r.f.exportAt(1)
	r.hosts[0].hold.Store(true)
	write4K(t, k.conn(0), 1)
	eventually(t, "the device has the first", func() bool { return inFlight(e) == 1 })
	giveUp(t, k.conn(0))
	write4K(t, k.conn(1), 1)
	eventually(t, "the second waits", func() bool { return e.claims.waiting.Load() == 1 })
	n := 0
	r.onQueue(1, func(*queue) { n = inFlight(e) }) // its claim comes and goes with every try
	if n != 1 {
		t.Error("both are with the device")
	}
	r.hosts[0].hold.Store(false)
	written(t, k.conn(1))
	kernelIO(t, k.conn(1), 2)
	r.removeKernelDisk()
}

// inFlight is how many writes are with the device, or about to be.
func inFlight(e *export) (n int) {
	for i := range e.claims.writes {
		if e.claims.writes[i].end.Load() != 0 {
			n++
		}
	}
	return n
}

// A request that has not reached the device when the kernel gives its
// connection up never does: it was sent again, and other data may have been
// written since.
func TestKernelDisk_GivenUpBeforeItIsRead(t *testing.T) {
	k := &fakeKernel{}
	r := newSeveralRig(t, k)
	release := make(chan struct{})
	held := make(chan struct{})
	go r.onQueue(0, func(*queue) { close(held); <-release })
	<-held
	write4K(t, k.conn(0), 1)
	giveUp(t, k.conn(0))
	for _, n := range []byte{1, 2} {
		write4K(t, k.conn(1), n)
		written(t, k.conn(1))
	}
	close(release)
	eventually(t, "the end of the first connection", func() bool { return k.conn(2) != nil })
	if got := r.disks[1].at(sentAt, 1)[0]; got != 2 {
		t.Errorf("the device has the data of write %d", got)
	}
	if !r.free(1) {
		t.Error("slots or claims are left")
	}
	r.removeKernelDisk()
}

// The same for a write that waits for another one when its connection ends.
func TestKernelDisk_GivenUpWhileItWaits(t *testing.T) {
	k := &fakeKernel{}
	r := newSeveralRig(t, k)
	e := r.f.exportAt(1)
	r.hosts[1].hold.Store(true)
	write4K(t, k.conn(1), 1)
	eventually(t, "the device has the first", func() bool { return inFlight(e) == 1 })
	write4K(t, k.conn(0), 3)
	eventually(t, "the second waits", func() bool { return e.claims.waiting.Load() == 1 })
	giveUp(t, k.conn(0))
	r.hosts[1].hold.Store(false)
	written(t, k.conn(1))
	eventually(t, "the end of the other connection", func() bool { return k.conn(2) != nil })
	if got := r.disks[1].at(sentAt, 1)[0]; got != 1 {
		t.Errorf("the device has the data of write %d", got)
	}
	if !r.free(1) {
		t.Error("slots or claims are left")
	}
	r.removeKernelDisk()
}

// Users of NBD sockets are not the kernel: their requests are executed, even if
// they do not wait for the answer.
func TestKernelDisk_OthersAreNotSentAgain(t *testing.T) {
	k := &fakeKernel{}
	r := newSeveralRig(t, k)
	c := dial(t, "unix", r.addr, "disk1", false)
	write4K(t, c.conn, 7)
	giveUp(t, c.conn)
	eventually(t, "the data", func() bool { return r.disks[1].at(sentAt, 1)[0] == 7 })
	r.removeKernelDisk()
}

func TestHungUp(t *testing.T) {
	ours, theirs := pair(t)
	defer closeAll([]int{ours})
	if hungUp(ours) || testing.AllocsPerRun(100, func() { hungUp(ours) }) != 0 {
		t.Error("hung up at once, or with allocations")
	}
	if _, err := theirs.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	giveUp(t, theirs)
	if !hungUp(ours) {
		t.Error("a shut socket with data is not hung up")
	}
}
