package main

import (
	"io"
	"log/slog"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// fakeDriver is the driver's side of an io_uring: commands that were submitted
// wait as fetches until a request is put into their tag, or the device stops.
type fakeDriver struct {
	t       testing.TB
	room    int // entries; a test may take it away
	sqes    [8]uring.SQE
	cmds    [8][ioCmdSize]byte
	filled  int
	fetches map[uint64]command   // by user data
	order   []command            // as submitted
	moves   map[uint64]uring.SQE // of payload, under way, by user data of the tag
	done    []uring.CQE
	submits int
	table   int // registered buffers, as reserved
}

type command struct {
	op     uint64
	user   uint64
	hw     uint16
	tag    uint16
	result int32
	addr   uint64
	pages  uint64
}

func (d *fakeDriver) Next() *uring.SQE {
	if d.filled >= min(d.room, len(d.sqes)) {
		return nil
	}
	d.sqes[d.filled] = uring.SQE{}
	d.filled++
	return &d.sqes[d.filled-1]
}

func (d *fakeDriver) Cmd(s *uring.SQE) []byte {
	for i := range d.sqes {
		if s == &d.sqes[i] {
			return d.cmds[i][:]
		}
	}
	d.t.Fatal("entry of another ring")
	return nil
}

func (d *fakeDriver) Pending() int { return d.filled }

func (d *fakeDriver) Submit() error {
	if d.room == 0 {
		return unix.EAGAIN
	}
	d.submits++
	for i := range d.filled {
		if s := d.sqes[i]; s.UserData&movedPages != 0 {
			d.moves[s.UserData&^movedPages] = s
			continue
		}
		b := d.cmds[i][:]
		c := command{op: d.sqes[i].Off, user: d.sqes[i].UserData, hw: native.Uint16(b), tag: native.Uint16(b[2:]),
			result: int32(native.Uint32(b[4:])), addr: native.Uint64(b[8:]), pages: d.sqes[i].Addr}
		if _, twice := d.fetches[c.user]; twice {
			d.t.Fatalf("tag %#x has two commands", c.user)
		}
		d.fetches[c.user] = c
		d.order = append(d.order, c)
	}
	d.filled = 0
	return nil
}

func (d *fakeDriver) Peek(dst []uring.CQE) int {
	n := copy(dst, d.done)
	d.done = d.done[:copy(d.done, d.done[n:])]
	return n
}

func (d *fakeDriver) ReserveBuffers(n int) error {
	if d.table != 0 {
		d.t.Error("the table of buffers is reserved twice")
	}
	d.table = n
	return nil
}

// moved ends the move of a tag's payload.
func (d *fakeDriver) moved(user uint64, res int32) {
	if _, ok := d.moves[user]; !ok {
		d.t.Fatalf("no payload of tag %#x is under way", user)
	}
	delete(d.moves, user)
	d.done = append(d.done, uring.CQE{UserData: user | movedPages, Res: res})
}

func (d *fakeDriver) Arm() bool { return len(d.done) == 0 && d.filled == 0 }

// complete ends the command of a tag.
func (d *fakeDriver) complete(user uint64, res int32) {
	if _, ok := d.fetches[user]; !ok {
		d.t.Fatalf("tag %#x is not fetched", user)
	}
	delete(d.fetches, user)
	d.done = append(d.done, uring.CQE{UserData: user, Res: res})
}

// stand is a queue with one hardware queue of one device.
type stand struct {
	t    testing.TB
	q    *queue
	drv  *fakeDriver
	host *shm.Completer
	dev  *ublkDevice
	p    *hardwareQueue

	entries [16]shm.SQE
	answer  shm.CQE
}

const standSlot = 8192

func newStand(t testing.TB, depth, entries int) *stand {
	t.Helper()
	s := newClosedStand(t, depth, entries)
	s.q.openPart(s.p)
	return s
}

// newClosedStand is a stand with a hardware queue that is not served yet.
func newClosedStand(t testing.TB, depth, entries int) *stand {
	t.Helper()
	ring, err := shm.NewHeapRing(entries)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ring.Close() })
	drv := &fakeDriver{t: t, room: 8, fetches: map[uint64]command{}, moves: map[uint64]uring.SQE{}}
	s := &stand{t: t, drv: drv, host: ring.Completer(), q: &queue{ring: ring.Submitter(), drv: drv, event: -1, log: quiet()}}
	s.dev = newDevice(&ctrlDevice{encoded: true}, &plugin.DeviceSpec{
		Index: 3, Name: "x", ArenaID: 9, Arena: make([]byte, 3*depth*standSlot), SlotSize: standSlot,
	}, quiet())
	s.p = s.part(1, depth)
	return s
}

func (s *stand) part(hw, depth int) *hardwareQueue {
	return &hardwareQueue{dev: s.dev, queue: s.q, hw: uint16(hw), char: 77, desc: make([]byte, descSize(depth)),
		base: uint32(hw * depth), tags: make([]requestTag, depth), ended: make(chan struct{})}
}

// request has the driver fill tag i of the stand's part.
func (s *stand) request(i int, opFlags uint32, sector uint64, sectors uint32) {
	d := s.p.desc[i*ioDescSize:]
	native.PutUint32(d, opFlags)
	native.PutUint32(d[4:], sectors)
	native.PutUint64(d[8:], sector)
	s.drv.complete(uint64(s.p.id)<<16|uint64(i), 0)
}

// hosted are the requests that the daemon finds.
func (s *stand) hosted() []shm.SQE {
	var out []shm.SQE
	var e [4]shm.SQE
	for n := s.host.Pop(e[:]); n > 0; n = s.host.Pop(e[:]) {
		out = append(out, e[:n]...)
	}
	return out
}

func (s *stand) reply(tag uint64, errno uint32) {
	s.host.Push(&shm.CQE{Tag: tag, Errno: errno})
	s.host.Publish()
}

// answerAll is the daemon that says yes to everything.
func (s *stand) answerAll() {
	for n := s.host.Pop(s.entries[:]); n > 0; n = s.host.Pop(s.entries[:]) {
		for i := range n {
			s.answer.Tag = s.entries[i].Tag
			s.host.Push(&s.answer)
		}
	}
	s.host.Publish()
}
