package client

import (
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// ring is one ring that serves several devices, as a front end's does.
type ring struct {
	t  testing.TB
	io *IO
}

func (r ring) submit(d *Device, slot int) {
	r.t.Helper()
	e := shm.SQE{Tag: uint64(d.index)<<32 | uint64(slot), Op: blk.Read, Len: 512, Device: d.index, Arena: d.index, ArenaOff: uint64(slot * d.slotSize())}
	if !r.io.sub.Push(&e) {
		r.t.Fatal("submit refused")
	}
	r.io.Flush()
}

// reap returns how many answers came for each device, and fails the test for
// those that are errors.
func (r ring) reap(into map[uint32]int) {
	r.t.Helper()
	n := r.io.sub.Pop(r.io.cqes[:])
	for _, c := range r.io.cqes[:n] {
		if into[uint32(c.Tag>>32)]++; c.Errno != 0 {
			r.t.Errorf("device %d slot %d: errno %d", c.Tag>>32, uint32(c.Tag), c.Errno)
		}
	}
}

// ringOf is a ring of entries for devices of c.
func ringOf(t testing.TB, d *Device) ring {
	t.Helper()
	io, err := d.NewIO(0, 0, d.arena.Size()/d.slotSize())
	must(t, err)
	return ring{t: t, io: io}
}

// A server that answers nothing holds up its own devices only, also those that
// share a ring with others.
func TestServerThatHangsLeavesDevicesOfOthersAlone(t *testing.T) {
	hangs, answers := newTarget(t, 1<<20), newTarget(t, 1<<20)
	c := hangs.newClient(func(cfg *Config) { cfg.Fabrics["other"] = answers.net.Device("clt") })
	d1, _ := hangs.device(c)
	d2, _ := answers.device(c, func(r *MapRequest) { r.Session, r.Paths = "other", []string{"10.0.0.1%other"} })
	hangs.set(func() { hangs.hold = true })
	r := ringOf(t, d1)
	got := map[uint32]int{}
	for slot := range 20 { // more than there are permits
		r.submit(d1, slot)
	}
	eventually(t, "all permits of the server are in use", hangs.busy)
	for round := range 50 {
		r.submit(d2, 0)
		eventually(t, "the other server's answer", func() bool { r.reap(got); return got[d2.index] == round+1 })
	}
	if got[d1.index] != 0 {
		t.Errorf("%d answers of a server that gives none", got[d1.index])
	}
	hangs.releaseAll(blk.OK)
	eventually(t, "the answers of the server that hung", func() bool { r.reap(got); return got[d1.index] == 20 })
}

// A device with requests that hang leaves permits to the others of its session.
func TestDeviceThatHangsLeavesPermitsToOthers(t *testing.T) {
	s := newTarget(t, 1<<20) // 16 permits
	c := s.newClient()
	var devices []*Device
	for i := range 8 {
		d, err := c.Map(t.Context(), MapRequest{Path: fmt.Sprint("vol", i), Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"})
		must(t, err)
		devices = append(devices, d)
	}
	hung := devices[0]
	s.set(func() { s.hung = map[uint32]bool{hung.id.Load(): true} })
	r := ringOf(t, hung)
	got := map[uint32]int{}
	for slot := range 16 {
		r.submit(hung, slot)
	}
	eventually(t, "its requests hang", func() bool { return s.holds() > 0 })
	for round := range 20 {
		for _, d := range devices[1:] {
			for slot := range 2 {
				r.submit(d, slot)
			}
		}
		eventually(t, "the others' answers", func() bool {
			r.reap(got)
			return !slices.ContainsFunc(devices[1:], func(d *Device) bool { return got[d.index] != 2*(round+1) })
		})
	}
	if n := s.holds(); n > 12 {
		t.Errorf("%d of 16 permits are in requests that hang", n)
	}
	s.releaseAll(blk.OK)
	eventually(t, "the answers of the device that hung", func() bool { r.reap(got); return got[hung.index] == 16 })
}

// A device that hangs and has its session alone leaves permits to OPEN.
func TestDeviceThatHangsDoesNotStopAMap(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, io := s.device(c)
	s.set(func() { s.hung = map[uint32]bool{d.id.Load(): true} })
	for slot := range 32 {
		io.Submit(Request{Op: blk.Read, Slot: slot, Len: 512})
	}
	io.Flush()
	eventually(t, "its requests hang", func() bool { return s.holds() >= 8 })
	_, second := s.device(c, func(r *MapRequest) { r.Path = "vol2" })
	if errno := do(t, second, Request{Op: blk.Read, Len: 512}); errno != blk.OK {
		t.Errorf("the second device: errno %d", errno)
	}
	s.releaseAll(blk.OK)
}

func TestWindow(t *testing.T) {
	for _, x := range []struct {
		name                  string
		depth, pumps, devices int
		total, lane, pool     int
		alone                 bool
	}{
		{"one device of the usual depth", 512, 2, 1, 492, 246, 245, true},
		{"sixteen devices", 512, 2, 16, 492, 246, 230, false},
		{"more devices than permits", 16, 1, 64, 12, 12, 6, false},
		{"few permits", 4, 2, 2, 2, 1, 0, false},
		{"one permit", 1, 2, 1, 1, 1, 0, true},
		{"not connected yet", 0, 1, 0, 1, 1, 1, true},
	} {
		t.Run(x.name, func(t *testing.T) {
			want := permitWindow{total: x.total, lane: x.lane, pool: x.pool, alone: x.alone}
			if w := *newWindow(x.depth, x.pumps, x.devices); w != want {
				t.Errorf("got %+v, want %+v", w, want)
			}
		})
	}
}

// Devices that hang, one after the other, never take the last permits.
func TestWindowLeavesPermitsToTheLast(t *testing.T) {
	for _, depth := range []int{16, 64, 128, 512} {
		for _, devices := range []int{2, 4, 8, 16} {
			l := &sessionLane{session: &session{}, pump: &pumpShare{}}
			l.session.lanes = []*sessionLane{l}
			w := newWindow(depth, 1, devices)
			l.session.window.Store(w)
			all := 0
			for range min(devices, w.total) {
				sh := &deviceShare{waiting: emptyList()}
				for l.mayAdmit(sh) {
					l.onSent(sh)
					all++
				}
				if sh.sent == 0 {
					t.Errorf("depth %d, %d devices: one has no permit", depth, devices)
				}
			}
			if devices <= w.total/2 && all > w.total {
				t.Errorf("depth %d: %d devices took %d permits of %d", depth, devices, all, w.total)
			}
		}
	}
}

// idleLane is a pump with one source and one device. Its requests are not sent.
func idleLane() (*pumpShare, *ringSource, *Device) {
	c := &Client{}
	p := &pumpShare{client: c}
	c.pumps = []*pumpShare{p}
	ses := &session{client: c}
	ses.lanes = []*sessionLane{{session: ses, pump: p}}
	ses.window.Store(newWindow(64, 1, 2))
	s := newSource(p, nil, nil, 64)
	s.orphaned = true // nobody reads answers
	p.sources = []*ringSource{s}
	return p, s, &Device{client: c, session: ses, shares: newShares(1), latency: make([]pumpLatencies, 1)}
}

// accept is onSubmit after its checks.
func (s *ringSource) accept(d *Device, tag uint64) uint32 {
	i := s.free[len(s.free)-1]
	s.free = s.free[:len(s.free)-1]
	s.reqs[i] = request{sqe: shm.SQE{Op: blk.Read, Tag: tag}, dev: d}
	s.inflight++
	d.shares[0].inflight.Add(1)
	return i
}

func TestLaneWaitsWithoutAllocating(t *testing.T) {
	p, s, d := idleLane()
	l := d.session.lanes[0]
	round := func() {
		for tag := range uint64(32) {
			i := s.accept(d, 32-tag)
			if tag%2 == 0 {
				l.enqueueRequest(d, s.requestTag(i))
			} else {
				l.waitAgain(d, s.requestTag(i))
			}
		}
		p.serveLanes()
	}
	if n := testing.AllocsPerRun(100, round); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if s.inflight != 0 || len(s.free) != 64 || d.inFlight() != 0 {
		t.Errorf("%d requests in flight, %d slots free, the device has %d", s.inflight, len(s.free), d.inFlight())
	}
}

// Requests that were sent before go first, in the order of tags.
func TestLaneOrderOfWaitingRequests(t *testing.T) {
	p, s, d := idleLane()
	l := d.session.lanes[0]
	for _, tag := range []uint64{9, 8} {
		l.enqueueRequest(d, s.requestTag(s.accept(d, tag)))
	}
	for _, tag := range []uint64{5, 3, 7, 1, 6} {
		i := s.accept(d, tag)
		s.reqs[i].sent = 1
		l.waitAgain(d, s.requestTag(i))
	}
	l.enqueueRequest(d, s.requestTag(s.accept(d, 2)))
	var got []uint64
	for at := d.shares[0].waiting.head; at != none; at = p.request(at).next {
		got = append(got, p.request(at).sqe.Tag)
	}
	if want := []uint64{1, 3, 5, 6, 7, 9, 8, 2}; !slices.Equal(got, want) {
		t.Errorf("order %d, want %d", got, want)
	}
}

// BenchmarkOneOf16Hangs is the rate of 15 devices of a session. The 16th is
// idle, or its requests hang.
func BenchmarkOneOf16Hangs(b *testing.B) {
	for _, hangs := range []bool{false, true} {
		b.Run(fmt.Sprintf("hangs=%t", hangs), func(b *testing.B) { oneOf16(b, hangs) })
	}
}

func oneOf16(b *testing.B, hangs bool) {
	s := newTarget(b, 1<<20)
	c := s.newClient()
	var devices []*Device
	for i := range 16 {
		d, err := c.Map(b.Context(), MapRequest{Path: fmt.Sprint("vol", i), Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"})
		must(b, err)
		devices = append(devices, d)
	}
	r := ringOf(b, devices[0])
	if hangs {
		s.set(func() { s.hung = map[uint32]bool{devices[0].id.Load(): true} })
		for slot := range 16 {
			r.submit(devices[0], slot)
		}
		eventually(b, "its requests hang", func() bool { return s.holds() > 0 })
	}
	b.ResetTimer()
	got, sent := map[uint32]int{}, 0
	for done := 0; done < b.N; {
		for ; sent < b.N && sent-done < 15; sent++ {
			r.submit(devices[1+sent%15], sent/15%32)
		}
		clear(got)
		r.reap(got)
		for _, n := range got {
			done += n
		}
		runtime.Gosched()
	}
	b.StopTimer()
	s.releaseAll(blk.OK)
}
