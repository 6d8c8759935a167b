package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

func TestDiskAttributes(t *testing.T) {
	if nativeIsBig() {
		t.Skip("the goldens are little-endian")
	}
	for _, v := range []struct {
		name   string
		config diskConfig
		want   string
	}{
		{"connect", diskConfig{index: 3, size: 1 << 30, block: 512, flags: 0x2d, withFlags: true, timeout: 30 * time.Second,
			deadTime: time.Hour, identity: "abc", sockets: []int{9, 10}},
			`0800 0100 03000000  0c00 0200 0000004000000000  0c00 0300 0002000000000000  0c00 0400 1e00000000000000
			0c00 0500 2d00000000000000  0c00 0800 100e000000000000  0800 0a00 61626300
			1c00 0780 0c00 0180 0800 0100 09000000 0c00 0180 0800 0100 0a000000`},
		{"connect anywhere", diskConfig{index: -1, size: 4096}, `0c00 0200 0010000000000000`},
		{"disconnect", diskConfig{index: 300}, `0800 0100 2c010000`},
	} {
		got, err := v.config.encodeAttributes()
		want, _ := hex.DecodeString(strings.Join(strings.Fields(v.want), ""))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: %v\n%s\nwant\n%s", v.name, err, hex.Dump(got), hex.Dump(want))
		}
	}
	if n, err := indexIn([]byte{8, 0, 1, 0, 7, 0, 0, 0}); n != 7 || err != nil {
		t.Errorf("index %d, %v", n, err)
	}
	for _, bad := range [][]byte{{}, {8, 0, 1, 0, 7}, {1, 2, 3}, {8, 0, 2, 0, 7, 0, 0, 0}} {
		if n, err := indexIn(bad); err == nil {
			t.Errorf("%x has index %d", bad, n)
		}
	}
}

func nativeIsBig() bool {
	data, err := (&diskConfig{index: 1}).encodeAttributes()
	return err != nil || data[0] == 0
}

func TestDiskSettings(t *testing.T) {
	def := diskSettings{attach: "no", number: -1, timeout: 30 * time.Second, connections: 1, queues: math.MaxInt}
	if s, err := parseSettings(nil); s != def || err != nil {
		t.Errorf("none: %+v, %v", s, err)
	}
	want := diskSettings{attach: "yes", number: 5, timeout: 3 * time.Second, connections: 4, queues: 1}
	if s, err := parseSettings(map[string]string{"attach": "yes", "number": "5", "timeout": "3", "connections": "4", "queues": "1"}); s != want || err != nil {
		t.Errorf("all: %+v, %v", s, err)
	}
	for k, v := range map[string]string{"attach": "maybe", "number": "-1", "timeout": "0", "connections": "17", "queues": "0", "colour": "red"} {
		if _, err := parseSettings(map[string]string{k: v}); blk.ToErrno(err) != blk.EINVAL || !strings.Contains(err.Error(), k) {
			t.Errorf("%s=%s: %v", k, v, err)
		}
	}
}

// fakeKernel keeps the ends of sockets that it is given, as the kernel does.
type fakeKernel struct {
	mu       sync.Mutex
	refuse   error
	deny     error  // refuses new connections of a disk that is there
	busy     int    // offers of a connection that are not taken yet
	late     int    // commands that are not answered in time
	mark     string // of the disk of an earlier process; empty: ours
	had      int    // connections of the disk of an earlier process
	commands []uint8
	configs  []diskConfig
	conns    []net.Conn
}

func (k *fakeKernel) sendCommand(cmd uint8, c *diskConfig) (int, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	defer closeAll(c.sockets)
	k.commands = append(k.commands, cmd)
	k.configs = append(k.configs, *c)
	if k.refuse != nil {
		return -1, k.refuse
	}
	if k.deny != nil && cmd == nlReconfigure && len(c.sockets) > 0 {
		return -1, k.deny
	}
	if k.late > 0 {
		k.late--
		return -1, blk.ETIMEDOUT
	}
	if cmd == nlDisconnect {
		for _, conn := range k.conns {
			conn.Close()
		}
	}
	if len(c.sockets) == 0 {
		return -1, nil
	}
	if cmd == nlReconfigure && k.busy > 0 {
		k.busy--
		return -1, nil
	}
	for _, theirs := range c.sockets {
		conn, err := ownConn(theirs)
		if err != nil {
			return -1, err
		}
		k.conns = append(k.conns, conn)
	}
	return 4, nil
}

func ownConn(fd int) (net.Conn, error) {
	fd, err := unix.Dup(fd)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "kernel's end")
	defer f.Close()
	return net.FileConn(f)
}

func (k *fakeKernel) queueCount(int) int   { return max(1, k.had) }
func (k *fakeKernel) mostConnections() int { return 4 }
func (k *fakeKernel) listDisks() []int     { return []int{3, 9} }
func (k *fakeKernel) backendIdentity(int) (string, bool) {
	if k.mark == "untold" {
		return "", false
	}
	return cmp.Or(k.mark, "id"), true
}

func (k *fakeKernel) conn(i int) net.Conn {
	k.mu.Lock()
	defer k.mu.Unlock()
	if i >= len(k.conns) {
		return nil
	}
	return k.conns[i]
}

func (k *fakeKernel) last() (uint8, diskConfig) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.commands[len(k.commands)-1], k.configs[len(k.configs)-1]
}

// newKernelRig has device 1, "disk1", that config describes.
func newKernelRig(t *testing.T, k *fakeKernel, with ...func(*plugin.DeviceSpec)) (*rig, error) {
	r := newRig(t, rigConfig{queues: 2})
	r.f.kernel = k
	r.disks[1] = newDisk(testLimits(4<<20), 16, 64<<10)
	return r, r.f.AddDevice(context.Background(), r.spec(with...))
}

// spec is device 1.
func (r *rig) spec(with ...func(*plugin.DeviceSpec)) plugin.DeviceSpec {
	s := plugin.DeviceSpec{
		Index: 1, Name: "disk1", Limits: r.disks[1].limits, Arena: r.disks[1].arena, ArenaID: 7, SlotSize: 64 << 10, Slots: 16,
		Queues: 2, Identity: "id", Config: map[string]string{"attach": "yes", "timeout": "5"},
	}
	for _, f := range with {
		f(&s)
	}
	return s
}

// io does a write and a read as the kernel does.
func kernelIO(t *testing.T, conn net.Conn, n byte) {
	t.Helper()
	data := bytes.Repeat([]byte{n}, 4096)
	conn.SetDeadline(time.Now().Add(20 * time.Second))
	conn.Write(append(command(nbdwire.CmdWrite, 0, 1, 8192, 4096), data...))
	reply := make([]byte, nbdwire.SimpleSize+4096)
	if _, err := conn.Read(reply[:nbdwire.SimpleSize]); err != nil || reply[7] != 0 {
		t.Fatalf("write: % x, %v", reply[:nbdwire.SimpleSize], err)
	}
	conn.Write(command(nbdwire.CmdRead, 0, 2, 8192, 4096))
	for got := 0; got < len(reply); {
		k, err := conn.Read(reply[got:])
		if err != nil {
			t.Fatal(err)
		}
		got += k
	}
	if !bytes.Equal(reply[nbdwire.SimpleSize:], data) {
		t.Error("data differ")
	}
}

func TestKernelDisk(t *testing.T) {
	k := &fakeKernel{}
	r, err := newKernelRig(t, k)
	must(t, "add", err)
	c := k.configs[0]
	if k.commands[0] != nlConnect || c.index != -1 || c.size != 4<<20 || c.timeout != 5*time.Second || c.deadTime != deadTime ||
		c.identity != "id" || c.flags&nbdwire.CanMultiConn != 0 || c.flags&nbdwire.SendFlush == 0 {
		t.Errorf("the kernel is told %+v", c)
	}
	if l := r.f.Location(1); l != "/dev/nbd4" {
		t.Errorf("location %q", l)
	}
	kernelIO(t, k.conn(0), 1)
	if n := r.f.exportAt(1).openerCount(); n != 0 {
		t.Errorf("the kernel's own connection counts as %d users", n)
	}
	must(t, "resize", r.f.ResizeDevice(t.Context(), 1, testLimits(8<<20)))
	if cmd, c := k.last(); cmd != nlReconfigure || c.size != 8<<20 || c.index != 4 || c.identity != "id" {
		t.Errorf("resize tells %d %+v", cmd, c)
	}
	must(t, "remove", r.f.RemoveDevice(t.Context(), 1, true))
	if cmd, c := k.last(); cmd != nlDisconnect || c.index != 4 {
		t.Errorf("removal tells %d %+v", cmd, c)
	}
	delete(r.disks, 1)
	if r.f.exportAt(1) != nil {
		t.Error("the export is left")
	}
}

// The kernel sends unanswered requests again as soon as it has a connection:
// not before the old requests have ended.
func TestKernelDisk_NewConnectionAfterTheLastRequest(t *testing.T) {
	k := &fakeKernel{busy: 2}
	r, err := newKernelRig(t, k)
	must(t, "add", err)
	e := r.f.exportAt(1)
	var held *op
	for i := range 2 { // a request that the device keeps
		r.onQueue(i, func(q *queue) {
			for _, c := range q.conns {
				if c.disk != nil {
					held = c.sh.takeSlot(c)
				}
			}
		})
	}
	if held == nil {
		t.Fatal("the kernel has no connection")
	}
	k.conn(0).Close()
	time.Sleep(100 * time.Millisecond)
	if k.conn(1) != nil {
		t.Fatal("the kernel has a new connection while a request of the old one is under way")
	}
	held.sh.q.do(func() { held.sh.putSlot(held) })
	eventually(t, "new connection", func() bool { return k.conn(1) != nil })
	kernelIO(t, k.conn(1), 2)
	if cmd, c := k.last(); cmd != nlReconfigure || c.identity != "id" || c.size != 0 {
		t.Errorf("the kernel is told %d %+v", cmd, c)
	}
	if n := e.openerCount(); n != 0 {
		t.Errorf("%d users", n)
	}
	must(t, "remove", r.f.RemoveDevice(t.Context(), 1, true))
	delete(r.disks, 1)
}

// A kernel that was too slow to take a connection is asked again.
func TestKernelDisk_NewConnectionFromASlowKernel(t *testing.T) {
	k := &fakeKernel{}
	r, err := newKernelRig(t, k)
	must(t, "add", err)
	k.mu.Lock()
	k.late = 1
	k.mu.Unlock()
	k.conn(0).Close()
	eventually(t, "new connection", func() bool { return k.conn(1) != nil })
	kernelIO(t, k.conn(1), 2)
	r.removeKernelDisk()
}

// After its end the number may be that of another disk.
func TestKernelDisk_EndsOnce(t *testing.T) {
	k := &fakeKernel{}
	r, err := newKernelRig(t, k)
	must(t, "add", err)
	d := r.f.exportAt(1).disk.Load()
	for range 2 {
		must(t, "detach", d.disconnectDisk())
	}
	ends := 0
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, cmd := range k.commands {
		if cmd == nlDisconnect {
			ends++
		}
	}
	if ends != 1 {
		t.Errorf("the kernel was told %d times", ends)
	}
}

func TestKernelDisk_TakenOver(t *testing.T) {
	k := &fakeKernel{busy: 3}
	r, err := newKernelRig(t, k, func(s *plugin.DeviceSpec) { s.Location = "/dev/nbd9" })
	must(t, "add", err)
	if cmd, c := k.last(); cmd != nlReconfigure || c.index != 9 || r.f.Location(1) != "/dev/nbd9" {
		t.Errorf("the kernel is told %d %+v, location %q", cmd, c, r.f.Location(1))
	}
	if cmd, c := k.last(); cmd != nlReconfigure || c.size != 4<<20 || len(c.sockets) != 0 {
		t.Errorf("the kernel is not told the size of now: %d %+v", cmd, c)
	}
	kernelIO(t, k.conn(0), 3)
	must(t, "remove", r.f.RemoveDevice(t.Context(), 1, true))
	delete(r.disks, 1)
}

// Another disk is made only where the kernel says that there is none of ours.
// Whatever else keeps it from telling, the disk of before may be mounted, and its
// requests wait for whoever asks again.
func TestKernelDisk_WhatIsGone(t *testing.T) {
	for _, v := range []struct {
		name string
		deny error
		gone bool
	}{
		{"no such disk, or somebody else's", unix.EINVAL, true},
		{"no NBD client in the kernel", fmt.Errorf("%w: %w", errNoKernel, blk.ENODEV), true},
		{"a kernel that is late", blk.ETIMEDOUT, false},
		{"interrupted", unix.EINTR, false},
		{"no memory", unix.ENOMEM, false},
		{"no netlink socket", fmt.Errorf("%w: %w", errNoKernel, unix.EMFILE), false},
		{"no permission", fmt.Errorf("%w: %w", errNoKernel, unix.EPERM), false},
	} {
		t.Run(v.name, func(t *testing.T) {
			k := &fakeKernel{deny: v.deny}
			r, err := newKernelRig(t, k, func(s *plugin.DeviceSpec) { s.Location, s.Config["attach"] = "/dev/nbd9", "auto" })
			if made := slices.Contains(k.commands, nlConnect); made != v.gone || (err == nil) != v.gone {
				t.Errorf("another disk is made: %t, want %t, %v", made, v.gone, err)
			}
			if v.gone {
				r.removeKernelDisk()
				return
			}
			if !errors.Is(err, v.deny) || r.f.exportAt(1) != nil || slices.Contains(k.commands, nlDisconnect) {
				t.Errorf("got %v, the kernel is told %d", err, k.commands)
			}
			k.set(func() { k.deny = nil })
			s := r.spec(func(s *plugin.DeviceSpec) { s.Location = "/dev/nbd9" })
			must(t, "add again", r.f.AddDevice(context.Background(), s))
			if l := r.f.Location(1); l != "/dev/nbd9" {
				t.Errorf("location %q", l)
			}
			kernelIO(t, k.conn(0), 3)
			r.removeKernelDisk()
		})
	}
}

// A disk that has to be looked for is found by its mark, and none is made.
func TestKernelDisk_LookedFor(t *testing.T) {
	for mark, there := range map[string]bool{"id": true, "another": false, "untold": false} {
		k := &fakeKernel{mark: mark}
		r, err := newKernelRig(t, k, func(s *plugin.DeviceSpec) { s.Location = plugin.LocationUnknown })
		if slices.Contains(k.commands, nlConnect) || (err == nil) != there || !there && !errors.Is(err, blk.ENODEV) {
			t.Errorf("mark %q: %v, the kernel is told %d", mark, err, k.commands)
		}
		if there {
			if l := r.f.Location(1); l != "/dev/nbd3" {
				t.Errorf("location %q", l)
			}
			r.removeKernelDisk()
		}
	}
}

// A disk that bears another mark, or none, is somebody else's, whatever the kernel
// says to a new connection.
func TestKernelDisk_Marks(t *testing.T) {
	for mark, ours := range map[string]bool{"id": true, "untold": true, "another": false, " ": false} {
		k := &fakeKernel{mark: mark}
		r, err := newKernelRig(t, k, func(s *plugin.DeviceSpec) { s.Location = "/dev/nbd9" })
		must(t, "add", err)
		if made := slices.Contains(k.commands, nlConnect); made == ours {
			t.Errorf("mark %q: another disk is made: %t", mark, made)
		}
		r.removeKernelDisk()
	}
}

// A disk that keeps all its connections is served by somebody still.
func TestKernelDisk_StillServed(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // or the kernel would be asked for long
	k := &fakeKernel{busy: math.MaxInt}
	d := &kernelDisk{exp: &export{}, kernel: k, log: quiet(), index: -1, config: diskConfig{identity: "id"}}
	if taken, err := d.takeOverAt(ctx, "/dev/nbd9"); taken || !errors.Is(err, blk.EBUSY) {
		t.Errorf("taken %t, %v", taken, err)
	}
}

// A connection that could not be made for want of something is tried again.
func TestKernelDisk_NewConnectionLater(t *testing.T) {
	k := &fakeKernel{}
	r, err := newKernelRig(t, k)
	must(t, "add", err)
	k.set(func() { k.deny = unix.ENOMEM })
	k.conn(0).Close()
	inTime(t, "the kernel is asked", func() bool { cmd, _ := k.last(); return cmd == nlReconfigure })
	k.set(func() { k.deny = nil })
	inTime(t, "new connection", func() bool { return k.conn(1) != nil })
	kernelIO(t, k.conn(1), 2)
	r.removeKernelDisk()
}

func (k *fakeKernel) set(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
}

// inTime is eventually for a machine that stalls.
func inTime(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("does not happen: %s", what)
		}
	}
}

func TestKernelDisk_WithoutKernel(t *testing.T) {
	none := fmt.Errorf("%w: not there: %w", errNoKernel, blk.ENODEV)
	r, err := newKernelRig(t, &fakeKernel{refuse: none}, func(s *plugin.DeviceSpec) { s.Config = map[string]string{"attach": "auto"} })
	if err != nil || !strings.HasPrefix(r.f.Location(1), "nbd+unix://") {
		t.Errorf("auto: %v, location %q", err, r.f.Location(1))
	}
	r, err = newKernelRig(t, &fakeKernel{refuse: none})
	if !errors.Is(err, errNoKernel) || blk.ToErrno(err) != blk.ENODEV || r.f.exportAt(1) != nil {
		t.Errorf("yes: %v", err)
	}
	delete(r.disks, 1)
	r, err = newKernelRig(t, &fakeKernel{refuse: unix.EBUSY}, func(s *plugin.DeviceSpec) { s.Config["number"] = "2" })
	if blk.ToErrno(err) != blk.EBUSY || !strings.Contains(err.Error(), "/dev/nbd2 is taken") || r.f.exportAt(1) != nil {
		t.Errorf("taken: %v", err)
	}
	delete(r.disks, 1)
}
