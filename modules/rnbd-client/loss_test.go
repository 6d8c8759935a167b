package client

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

func lossQueue(d time.Duration) func(*MapRequest) {
	return func(r *MapRequest) { r.Loss.Queue = d }
}

func TestR142_LossFail(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient())
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	start := time.Now()
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.EIO {
		t.Errorf("R-142: errno %d, want EIO", errno)
	}
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("R-103: it took %s", took)
	}
	s.set(func() { s.rsp.Sectors *= 2 })
	s.start()
	eventually(t, "open again", func() bool { return d.State() == Open })
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.OK {
		t.Errorf("after the return: errno %d", errno)
	}
	if got := d.Limits().Size; got != 2<<20 {
		t.Errorf("R-142: size %d after the reconnect, want the new %d", got, 2<<20)
	}
	messages := s.messages()
	if n := len(messages); messages[n-3] != "sess-info" || messages[n-2] != "open vol" {
		t.Errorf("R-123: after the reconnect: %q", messages)
	}
}

// A session may be lost before the call that opens it has returned.
func TestLostWhileItIsOpened(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	r := MapRequest{Session: "s", Paths: []string{"10.0.0.1"}}
	addrs, err := c.pathAddresses(t.Context(), r.Paths)
	must(t, err)
	ses := c.newSession("s", r, addrs)
	cfg, err := ses.transportConfig(r.tuning)
	must(t, err)
	transport, err := rtrs.Open(t.Context(), "s", addrs, cfg) // ses does not know it
	must(t, err)
	defer transport.Close(t.Context())
	s.kill()
	eventually(t, "the loss is told", func() bool {
		ses.mu.Lock()
		defer ses.mu.Unlock()
		return len(ses.events) > 0
	})
	must(t, transport.Close(t.Context())) // after the last event was handled
	if ses.ready.Load() || ses.downs.Load() != 1 {
		t.Errorf("ready %t, lost %d times", ses.ready.Load(), ses.downs.Load())
	}
}

// The same with all of the client, at any moment: a server that goes while it is being
// connected to costs the map, and a later one succeeds.
func TestServerGoesWhileItIsConnected(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	r := MapRequest{Path: "vol", Session: "s", Paths: []string{"10.0.0.1", "10.0.1.1"}, Frontend: "none", AnyPath: true}
	for i := range 20 {
		mapped := make(chan error, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		go func() {
			_, err := c.Map(ctx, r)
			mapped <- err
		}()
		time.Sleep(time.Duration(i) * 200 * time.Microsecond) // a moment of the map, another one each time
		s.kill()
		s.start()
		if <-mapped == nil {
			must(t, c.Unmap(t.Context(), "rnbd0", true))
		}
		cancel()
	}
	eventually(t, "a later map succeeds", func() bool { _, err := c.Map(t.Context(), r); return err == nil })
}

func TestLossFailEndsRequestsInFlight(t *testing.T) {
	s := newTarget(t, 1<<20)
	_, io := s.device(s.newClient())
	s.set(func() { s.hold = true })
	for slot := range 20 { // 16 on the server, 4 waiting for a permit
		io.Submit(Request{Op: blk.Write, Slot: slot, Off: uint64(slot) * 512, Len: 512})
	}
	io.Flush()
	eventually(t, "requests on the server", s.busy)
	s.net.Cut(s.addrs[0].Addr(), s.net.Conns()[0][0].Addr())
	var done [64]Done
	for left := 20; left > 0; {
		n := io.Wait(done[:])
		for _, x := range done[:n] {
			if x.Errno != blk.EIO && x.Errno != blk.OK {
				t.Errorf("errno %d", x.Errno)
			}
		}
		left -= n
	}
}

// Requests that wait for a permit when their device is taken away are not sent
// when there is one: the id in them may be another device's by then.
func TestFailedGateStopsRequestsThatWaitForAPermit(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient())
	s.set(func() { s.hold = true })
	for slot := range 20 { // more than there are permits
		io.Buf(slot)[0] = 1
		io.Submit(Request{Op: blk.Write, Slot: slot, Off: uint64(slot) * 512, Len: 512})
	}
	io.Flush()
	eventually(t, "requests on the server", s.busy)
	d.failRequests()
	failed := map[int]bool{}
	var done [64]Done
	eventually(t, "those that wait have failed", func() bool {
		for _, x := range done[:io.Reap(done[:])] {
			failed[x.Slot] = true
			if x.Errno != blk.EIO {
				t.Errorf("slot %d: errno %d, want EIO", x.Slot, x.Errno)
			}
		}
		return len(failed) > 0 && len(failed)+s.holds() == 20
	})
	left := s.holds()
	s.releaseAll(blk.OK)
	for left > 0 {
		left -= io.Wait(done[:])
	}
	for slot := range 20 {
		if written := s.data[slot*512] == 1; written == failed[slot] {
			t.Errorf("slot %d: written %t, failed %t", slot, written, failed[slot])
		}
	}
}

func TestLossQueueWaitsForTheReturn(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient(), lossQueue(30*time.Second))
	s.set(func() { s.hold = true })
	for slot := range 20 {
		for i := range io.Buf(slot)[:512] {
			io.Buf(slot)[i] = byte(slot + 1)
		}
		io.Submit(Request{Op: blk.Write, Slot: slot, Off: uint64(slot) * 512, Len: 512})
	}
	io.Flush()
	eventually(t, "requests on the server", s.busy)
	s.net.RefuseDial(s.addrs[0], syscall.ECONNREFUSED)
	s.net.Cut(s.addrs[0].Addr(), s.net.Conns()[0][0].Addr())
	eventually(t, "closed", func() bool { return d.State() == Closed })
	io.Submit(Request{Op: blk.Read, Slot: 20, Len: 512}) // waits too
	io.Flush()
	var done [64]Done
	time.Sleep(20 * time.Millisecond)
	if n := io.Reap(done[:]); n != 0 {
		t.Fatalf("%d answers while there is no server: %v", n, done[:n])
	}
	s.net.RefuseDial(s.addrs[0], nil)
	time.Sleep(20 * time.Millisecond)
	if n := io.Reap(done[:]); n != 0 {
		t.Fatalf("%d answers while the server still works on the old path's requests: %v", n, done[:n])
	}
	s.releaseAll(blk.OK)
	for left := 21; left > 0; {
		n := io.Wait(done[:])
		for _, x := range done[:n] {
			if x.Errno != blk.OK {
				t.Errorf("slot %d: errno %d", x.Slot, x.Errno)
			}
		}
		left -= n
	}
	for slot := range 20 {
		if got := s.data[slot*512]; got != byte(slot+1) {
			t.Errorf("slot %d: byte %d on the disk", slot, got)
		}
	}
}

func TestLossQueueReissues(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient(), lossQueue(30*time.Second))
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	for slot := range 20 {
		for i := range io.Buf(slot)[:512] {
			io.Buf(slot)[i] = byte(slot + 1)
		}
		io.Submit(Request{Op: blk.Write, Slot: slot, Off: uint64(slot) * 512, Len: 512})
	}
	io.Flush()
	time.Sleep(20 * time.Millisecond)
	oldID := d.id.Load()
	s.set(func() { s.ios = nil })
	s.start()
	var done [64]Done
	for left := 20; left > 0; {
		n := io.Wait(done[:])
		for _, x := range done[:n] {
			if x.Errno != blk.OK {
				t.Errorf("slot %d: errno %d", x.Slot, x.Errno)
			}
		}
		left -= n
	}
	for slot := range 20 {
		if got := s.data[slot*512]; got != byte(slot+1) {
			t.Errorf("slot %d: byte %d on the disk", slot, got)
		}
	}
	s.set(func() {
		for i, m := range s.ios {
			if m.DeviceID == oldID || m.DeviceID != d.id.Load() {
				t.Errorf("request %d with the device id %d, not the new %d", i, m.DeviceID, d.id.Load())
			}
			if i > 0 && i < 12 && m.Sector < s.ios[i-1].Sector {
				t.Errorf("request %d for sector %d came after that for %d: not in the order of tags", i, m.Sector, s.ios[i-1].Sector)
			}
		}
	})
}

func TestLossQueueEnds(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, io := s.device(c, lossQueue(200*time.Millisecond))
	start := time.Now()
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.EIO {
		t.Errorf("errno %d, want EIO", errno)
	}
	if took := time.Since(start); took < 200*time.Millisecond {
		t.Errorf("it failed after %s, too early", took)
	}
	s.start()
	eventually(t, "the session is back", d.session.transport.Connected)
	time.Sleep(50 * time.Millisecond)
	if d.State() != Closed {
		t.Errorf("state %s; a device whose time ran out stays closed until it is remapped", d.State())
	}
	if _, err := c.Remap(t.Context(), d.Name()); err != nil {
		t.Fatalf("remap: %v", err)
	}
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.OK {
		t.Errorf("after the remap: errno %d", errno)
	}
}

func TestLossQueueAndAServerThatChanged(t *testing.T) {
	for _, x := range []struct {
		name   string
		change func(*target)
	}{
		{"another client writes to it", func(s *target) { s.openErr = blk.EPERM }},
		{"it shrank", func(s *target) { s.rsp.Sectors /= 2 }},
	} {
		t.Run(x.name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			c := s.newClient()
			d, io := s.device(c, lossQueue(30*time.Second))
			s.kill()
			eventually(t, "closed", func() bool { return d.State() == Closed })
			s.set(func() { x.change(s) })
			io.Submit(Request{Op: blk.Write, Len: 512})
			io.Flush()
			s.start()
			var done [8]Done
			eventually(t, "the answer", func() bool { return io.Wait(done[:]) > 0 })
			if done[0].Errno != blk.EIO || d.State() != Closed {
				t.Errorf("errno %d, state %s", done[0].Errno, d.State())
			}
		})
	}
}

func TestLossQueueTriesAgainAfterAPassingError(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient(), lossQueue(30*time.Second))
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	s.set(func() { s.openErr = blk.EBUSY })
	s.start()
	eventually(t, "a refused open", func() bool { return len(s.messages()) >= 4 })
	s.set(func() { s.openErr = 0 })
	if errno := do(t, io, Request{Op: blk.Read, Len: 512}); errno != blk.OK {
		t.Errorf("errno %d", errno)
	}
}

// TestAbsenceIsNoDecision: a server may be back before its storage.
func TestAbsenceIsNoDecision(t *testing.T) {
	for _, errno := range []blk.Errno{blk.ENOENT, blk.Errno(syscall.ENOTBLK), blk.EINVAL, blk.Errno(syscall.ENXIO)} {
		s := newTarget(t, 1<<20)
		d, io := s.device(s.newClient(), lossQueue(30*time.Second))
		s.kill()
		eventually(t, "closed", func() bool { return d.State() == Closed })
		s.set(func() { s.openErr = errno })
		opens := len(s.messages())
		io.Submit(Request{Op: blk.Write, Len: 512})
		io.Flush()
		s.start()
		eventually(t, "a refused open", func() bool { return len(s.messages()) >= opens+2 })
		s.set(func() { s.openErr = 0 })
		var done [8]Done
		eventually(t, "the answer", func() bool { return io.Wait(done[:]) > 0 })
		if done[0].Errno != blk.OK {
			t.Errorf("OPEN answered with errno %d first: the waiting write ends with errno %d", errno, done[0].Errno)
		}
	}
}

// TestAnAbsentDevice_OpensAfterItsTimeHasRunOut: its requests fail then, and it opens
// again when the storage is back, because no user has it open.
func TestAnAbsentDevice_OpensAfterItsTimeHasRunOut(t *testing.T) {
	s := newTarget(t, 1<<20)
	dir := newFrontDir(t)
	must(t, dir.set("open", ""))
	r := MapRequest{Path: "vol", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": string(dir)}}
	lossQueue(100 * time.Millisecond)(&r)
	d, err := s.newClient(withTestFront(t)).Map(t.Context(), r)
	must(t, err)
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	s.set(func() { s.openErr = blk.ENOENT })
	s.start()
	eventually(t, "its time has run out", d.hasExpired)
	s.set(func() { s.openErr = 0 })
	time.Sleep(3 * reopenDelay)
	if d.State() != Closed {
		t.Fatalf("state %s while a user has it open", d.State())
	}
	must(t, dir.remove("open"))
	eventually(t, "open", func() bool { return d.State() == Open })
}

func TestRemapErrors(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, _ := s.device(c)
	if _, err := c.Remap(t.Context(), d.Name()); !errors.Is(err, syscall.EALREADY) {
		t.Errorf("open device: %v, want EALREADY", err)
	}
	if _, err := c.Remap(t.Context(), "rnbd7"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("no device: %v, want ENOENT", err)
	}
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	if _, err := c.Remap(t.Context(), d.Name()); !errors.Is(err, syscall.ECONNABORTED) {
		t.Errorf("no path: %v, want ECONNABORTED", err)
	}
}

func TestSecondPathKeepsTheDeviceOpen(t *testing.T) {
	s := newTarget(t, 1<<20)
	d, io := s.device(s.newClient(), func(r *MapRequest) { r.Paths = []string{"10.0.0.9@10.0.0.1", "10.0.1.9@10.0.1.1"} })
	for i := range 100 {
		if i == 50 {
			for _, conn := range s.net.Conns() {
				if conn[1] == s.addrs[0] {
					s.net.CutConn(conn[0], conn[1])
				}
			}
		}
		if errno := do(t, io, Request{Op: blk.Write, Off: uint64(i) * 512, Len: 512}); errno != blk.OK {
			t.Fatalf("R-102: write %d: errno %d", i, errno)
		}
	}
	if d.State() != Open {
		t.Errorf("state %s", d.State())
	}
}

func TestForcedUnmapWithADeadServer(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, io := s.device(c, lossQueue(time.Hour))
	s.kill()
	eventually(t, "closed", func() bool { return d.State() == Closed })
	io.Submit(Request{Op: blk.Read, Len: 512})
	io.Flush()
	eventually(t, "the request waits", func() bool { return d.inFlight() == 1 })
	start := time.Now()
	must(t, c.Unmap(t.Context(), d.Name(), true))
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
	var done [8]Done
	eventually(t, "the answer", func() bool { return io.Reap(done[:]) > 0 })
	if done[0].Errno != blk.EIO {
		t.Errorf("errno %d", done[0].Errno)
	}
}

// A server that comes back with another queue depth serves the device again, and all of
// its permits are used.
func TestServerComesBackWithAnotherQueueDepth(t *testing.T) {
	for _, depth := range []int{4, 64} {
		s := newTarget(t, 1<<20)
		d, io := s.device(s.newClient(), lossQueue(time.Minute))
		s.kill()
		eventually(t, "closed", func() bool { return d.State() == Closed })
		for slot := range 20 {
			io.Submit(Request{Op: blk.Write, Slot: slot, Off: uint64(slot) * 512, Len: 512})
		}
		io.Flush()
		s.depth = depth
		s.start()
		var done [64]Done
		for left := 20; left > 0; {
			n := io.Wait(done[:])
			for _, x := range done[:n] {
				if x.Errno != blk.OK {
					t.Errorf("queue depth %d, slot %d: errno %d", depth, x.Slot, x.Errno)
				}
			}
			left -= n
		}
		if got := d.session.transport.QueueDepth(); got != depth {
			t.Errorf("queue depth %d, want %d", got, depth)
		}
	}
}
