package server

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// writer says WRITER.
func (i *initiator) writer(id uint32, number uint64) (rnbdwire.WriterRspFields, error) {
	msg := make([]byte, rnbdwire.WriterSize)
	rnbdwire.WriterFields{DeviceID: id, Writer: number}.Put(msg)
	rsp := make(rnbdwire.WriterRsp, rnbdwire.WriterRspSize)
	err := i.session.AdminRead(i.ctx(), msg, rsp)
	if err == nil && !rsp.IsValid() {
		i.t.Errorf("WRITER_RSP %x", rsp)
	}
	return rsp.Fields(), err
}

// once sends a numbered write of 512 bytes of value at a sector; again: the fields of its
// repetition.
func (i *initiator) once(id uint32, sector uint64, value byte, number uint64, again *rnbdwire.AgainFields) <-chan int {
	i.t.Helper()
	i.mu.Lock()
	off := int(i.next%8) << 17
	i.mu.Unlock()
	for k := range i.mem[off : off+512] {
		i.mem[off+k] = value
	}
	msg := make([]byte, rnbdwire.IOAgainSize)
	copy(msg, ioMessage(id, blk.Write, 0, sector, 512))
	if again != nil {
		rnbdwire.PutIOAgain(msg, number, *again)
		return i.start(false, 512, msg)
	}
	rnbdwire.PutIOOnce(msg, number)
	return i.start(false, 512, msg[:rnbdwire.IOOnceSize])
}

// openWriter opens a device in mode migration as that writer.
func (i *initiator) openWriter(name string, writer uint64) (id uint32, rsp rnbdwire.WriterRspFields) {
	i.t.Helper()
	_, err := i.writer(rnbdwire.NoDevice, writer)
	must(i.t, err)
	dev, err := i.open(name, blk.Migration)
	must(i.t, err)
	rsp, err = i.writer(dev.DeviceID, writer)
	must(i.t, err)
	return dev.DeviceID, rsp
}

func (i *initiator) mustWrite(id uint32, value byte) {
	i.t.Helper()
	data := make([]byte, 512)
	for k := range data {
		data[k] = value
	}
	if errno := i.rw(id, blk.Write, 0, data); errno != blk.OK {
		i.t.Fatalf("write: errno %d", errno)
	}
}

// value is the first byte of a disk.
func (m *memory) value(name string) byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.disks[name].data[0]
}

// A write is not carried out again if its answer was lost with its path, even
// if others have written meanwhile.
func TestE026_WriteThatIsRepeatedOnAnotherPathIsCarriedOutOnce(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	second, third := netip.MustParseAddrPort("10.0.1.1:1234"), netip.MustParseAddrPort("10.0.2.1:1234")
	r := newRig(t, mem, func(c *Config) {
		srv := c.Listen[0].Device
		c.Listen = append(c.Listen, Listen{Device: srv, Addr: second}, Listen{Device: srv, Addr: third})
	})
	one, two := r.connectTo("one", r.addr, second), r.connectTo("two", third)
	id, _ := one.openWriter("vol", 1)
	other, _ := two.openWriter("vol", 2)
	mem.setMute('A')
	done := one.once(id, 0, 'A', 7, nil)
	eventually(t, "A is written", func() bool { return mem.value("vol") == 'A' })
	two.mustWrite(other, 'B')
	for _, p := range one.session.Paths() {
		if p.Stats.Inflight > 0 {
			r.net.Cut(p.Addr.Dst.Addr(), p.Src)
		}
	}
	eventually(t, "a path is lost", func() bool {
		for _, p := range one.session.Paths() {
			if p.State != rtrs.PathConnected {
				return true
			}
		}
		return false
	})
	mem.setMute(0)
	if errno := one.await(done); errno != blk.OK {
		t.Errorf("A is answered with errno %d", errno)
	}
	if got := mem.value("vol"); got != 'B' {
		t.Errorf("A, B, then %c", got)
	}
	if errno := one.await(one.once(id, 0, 'C', 8, nil)); errno != blk.OK || mem.value("vol") != 'C' {
		t.Errorf("the next write: errno %d, %c", errno, mem.value("vol"))
	}
}

// A repetition in a new session is refused if another client has written since.
func TestE028_WriteThatIsRepeatedInAnotherSession(t *testing.T) {
	type state struct {
		r        *rig
		one, two *initiator
	}
	write := func(s state) {
		id, _ := s.two.openWriter("vol", 2)
		s.two.mustWrite(id, 'B')
	}
	for name, c := range map[string]struct {
		before, since func(state)
		change        func(*rnbdwire.AgainFields)
		refused       bool
	}{
		"nobody else is there":                       {},
		"another one wrote":                          {since: write, refused: true},
		"another one wrote, and is gone":             {since: func(s state) { write(s); s.two.close() }, refused: true},
		"another one wrote before":                   {before: write},
		"another one wrote before, and is gone":      {before: func(s state) { write(s); s.two.close() }},
		"another one has it open, and wrote nothing": {since: func(s state) { s.two.openWriter("vol", 2) }},
		"another one had it open, and wrote nothing": {since: func(s state) { s.two.openWriter("vol", 2); s.two.close() }},
		"another one wrote, long after the last change": {since: func(s state) {
			id, _ := s.two.openWriter("vol", 2)
			s.r.usage().stopTiming()
			s.two.mustWrite(id, 'B')
		}, refused: true},
		"its own OPEN was answered, and it was lost": {since: func(s state) {
			lost := s.r.connect("lost")
			_, err := lost.writer(rnbdwire.NoDevice, 1)
			must(s.r.t, err)
			_, err = lost.open("vol", blk.Migration)
			must(s.r.t, err)
			lost.close()
		}},
		"another one reads": {since: func(s state) {
			_, err := s.two.open("vol", blk.ReadOnly)
			must(s.r.t, err)
		}},
		"the server was started since": {change: func(f *rnbdwire.AgainFields) { f.Since.Server++ }},
		"the server was started since, and another one has it open": {
			since:  func(s state) { s.two.openWriter("vol", 2) },
			change: func(f *rnbdwire.AgainFields) { f.Since.Server++ }, refused: true,
		},
		"the server was started since, and another one had it open": {
			change: func(f *rnbdwire.AgainFields) { f.Since.Server++; f.Shared = true }, refused: true,
		},
		"the server was started since, and another one has come and gone": {
			since:  func(s state) { write(s); s.two.close() },
			change: func(f *rnbdwire.AgainFields) { f.Since.Server++ }, refused: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			mem := newMemory()
			mem.add("vol", 1<<20)
			r := newRig(t, mem)
			s := state{r, r.connect("one"), r.connect("two")}
			if c.before != nil {
				c.before(s)
			}
			id, rsp := s.one.openWriter("vol", 1)
			again := rnbdwire.AgainFields{Since: rsp.Mark, Shared: rsp.Shared}
			if c.change != nil {
				c.change(&again)
			}
			if errno := s.one.await(s.one.once(id, 0, 'A', 7, nil)); errno != blk.OK {
				t.Fatalf("A: errno %d", errno)
			}
			if errno := s.one.await(s.one.once(id, 0, 'a', 8, nil)); errno != blk.OK { // own writes do not count
				t.Fatalf("a: errno %d", errno)
			}
			s.one.close()
			eventually(t, "the session is gone", func() bool { return len(r.server.front.Load().rtrs.Sessions()) < 2 })
			if c.since != nil {
				c.since(s)
			}
			before := mem.value("vol")
			back := r.connect("back")
			id, _ = back.openWriter("vol", 1)
			errno := back.await(back.once(id, 0, 'A', 7, &again))
			got := mem.value("vol")
			if c.refused && (errno != blk.EREMCHG || got != before) {
				t.Errorf("errno %d, want EREMCHG; %c has become %c", errno, before, got)
			}
			if !c.refused && (errno != blk.OK || got != 'A') {
				t.Errorf("errno %d; %c has become %c, not A", errno, before, got)
			}
			if errno := back.await(back.once(id, 0, 'D', 9, nil)); errno != blk.OK || mem.value("vol") != 'D' {
				t.Errorf("a new write: errno %d", errno)
			}
		})
	}
}

// A write of a dead plugin is not sent again if another client's write was
// answered meanwhile.
func TestE030_WriteOfADeadPluginAfterAnotherClients(t *testing.T) {
	for name, other := range map[string]bool{"alone": false, "another client wrote": true} {
		t.Run(name, func(t *testing.T) {
			mem := newMemory()
			mem.crash = plugin.KeepsAcknowledged
			mem.add("vol", 1<<20)
			r := newRig(t, mem)
			one, two := r.connect("one"), r.connect("two")
			id, _ := one.openWriter("vol", 1)
			id2, _ := two.openWriter("vol", 2)
			mem.setMute('A')
			a := one.once(id, 0, 'A', 7, nil)
			eventually(t, "A is written", func() bool { return mem.value("vol") == 'A' })
			want, value := blk.OK, byte('A')
			if other {
				two.mustWrite(id2, 'B')
				want, value = blk.EREMCHG, 'B'
			}
			r.process().Kill()
			mem.setMute(0)
			if errno := one.await(a); errno != want {
				t.Errorf("errno %d, want %d", errno, want)
			}
			if got := mem.value("vol"); got != value {
				t.Errorf("%c on the disk, want %c", got, value)
			}
			if errno := one.await(one.once(id, 0, 'C', 8, nil)); errno != blk.OK {
				t.Errorf("a new write: errno %d", errno)
			}
		})
	}
}

// While a write is repeated, those of other clients wait for its end.
func TestE028_WritesWaitForARepetitionOfAnotherClient(t *testing.T) {
	mem := newMemory()
	disk := mem.add("vol", 1<<20)
	r := newRig(t, mem)
	one, two := r.connect("one"), r.connect("two")
	id, rsp := one.openWriter("vol", 1)
	id2, _ := two.openWriter("vol", 2)
	disk.hung.Store(true)
	a := one.once(id, 0, 'A', 7, &rnbdwire.AgainFields{Since: rsp.Mark})
	eventually(t, "the plugin has A", func() bool { return len(mem.requests()) == 1 })
	own := one.once(id, 8, 'a', 8, nil)
	b := two.once(id2, 0, 'B', 1, nil)
	eventually(t, "the plugin has the other write of the same client", func() bool { return len(mem.requests()) == 2 })
	time.Sleep(20 * time.Millisecond)
	if n := len(mem.requests()); n != 2 {
		t.Errorf("the plugin has %d requests", n)
	}
	disk.hung.Store(false)
	for name, done := range map[string]<-chan int{"A": a, "a": own, "B": b} {
		if errno := one.await(done); errno != blk.OK {
			t.Errorf("%s: errno %d", name, errno)
		}
	}
	if got := mem.value("vol"); got != 'B' {
		t.Errorf("%c on the disk, want B", got)
	}
}

// A second writer is admitted when the first one's client knows it.
func TestE029_OpenWaitsUntilTheOtherWriterKnows(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	r := newRig(t, mem)
	one, two := r.connect("one"), r.connect("two")
	id, rsp := one.openWriter("vol", 1)
	if rsp.Shared {
		t.Error("alone, and told to be shared")
	}
	news := one.listen(0)
	r.parked("one")
	opened := make(chan error, 1)
	go func() { _, err := two.open("vol", blk.Migration); opened <- err }()
	e := await(t, news)
	if e.err != nil || e.Kind != rnbdwire.EventShared || e.DeviceID != id {
		t.Errorf("news %+v", e)
	}
	select {
	case err := <-opened:
		t.Errorf("OPEN is answered (%v) before the news were seen", err)
	case <-time.After(50 * time.Millisecond):
	}
	one.listen(e.Number)
	if err := await(t, opened); err != nil {
		t.Errorf("OPEN: %v", err)
	}
	if rsp, err := one.writer(id, 1); err != nil || !rsp.Shared {
		t.Errorf("WRITER: shared %t, %v", rsp.Shared, err)
	}
	two.close()
	eventually(t, "alone again", func() bool { rsp, err := one.writer(id, 1); return err == nil && !rsp.Shared })
}

func TestE027_WriterThatIsRefused(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	i := newRig(t, mem).connect("s")
	dev, err := i.open("vol", blk.ReadOnly)
	must(t, err)
	for name, c := range map[string]struct {
		id     uint32
		writer uint64
		want   error
	}{
		"of a device that is open read-only": {dev.DeviceID, 1, syscall.EPERM},
		"of a device that is not there":      {99, 1, syscall.ENOTCONN},
		"without a number":                   {dev.DeviceID, 0, syscall.EINVAL},
	} {
		if _, err := i.writer(c.id, c.writer); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
}

// departures remembers two writers exactly, and the others as one.
func TestDepartures(t *testing.T) {
	type left struct {
		writer uint64
		at     int64
	}
	for name, c := range map[string]struct {
		left []left
		want map[uint64]int64
	}{
		"nobody":             {nil, map[uint64]int64{1: 0}},
		"one that wrote not": {[]left{{1, 0}}, map[uint64]int64{1: 0, 2: 0}},
		"one, twice":         {[]left{{1, 5}, {1, 9}}, map[uint64]int64{1: 0, 2: 9}},
		"two":                {[]left{{1, 5}, {2, 9}}, map[uint64]int64{1: 9, 2: 5, 3: 9}},
		"two, not in order":  {[]left{{2, 9}, {1, 5}}, map[uint64]int64{1: 9, 2: 5, 3: 9}},
		"there and back":     {[]left{{1, 5}, {2, 9}, {1, 12}}, map[uint64]int64{1: 9, 2: 12, 3: 12}},
	} {
		var d departedWriters
		for _, l := range c.left {
			d.noteWrite(l.writer, l.at)
		}
		for writer, want := range c.want {
			if got := d.butOf(writer); got != want {
				t.Errorf("%s: others than %d wrote until %d, want %d", name, writer, got, want)
			}
		}
	}
}

// usage is that of the only node.
func (r *rig) usage() *writerHistory {
	r.server.mu.Lock()
	defer r.server.mu.Unlock()
	for _, u := range r.server.histories {
		return u
	}
	return nil
}

// A write that a dead plugin had may end without an answer, when its path goes before
// the next process is there. Its repetition on the other path is carried out: nothing
// is known of the first time but that it may have been.
func TestE026_WriteOfADeadPluginWhosePathIsLost(t *testing.T) {
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("vol", 1<<20)
	second := netip.MustParseAddrPort("10.0.1.1:1234")
	r := newRig(t, mem, func(c *Config) {
		c.RetireAfter = 20 * time.Millisecond
		c.Listen = append(c.Listen, Listen{Device: c.Listen[0].Device, Addr: second})
	})
	one := r.connectTo("one", r.addr, second)
	id, _ := one.openWriter("vol", 1)
	mem.setMute('A')
	done := one.once(id, 0, 'A', 7, nil)
	eventually(t, "A is written", func() bool { return mem.value("vol") == 'A' })
	begun := len(mem.requests())
	opens := mem.setGate()
	r.process().Kill()
	mem.setMute(0)
	for _, p := range one.session.Paths() {
		if p.Stats.Inflight > 0 {
			r.net.Cut(p.Addr.Dst.Addr(), p.Src)
		}
	}
	d := r.server.openDevices()[0]
	eventually(t, "the write is retired", func() bool { return d.retired.Load() > 0 })
	close(opens)
	if errno := one.await(done); errno != blk.OK {
		t.Errorf("the write is answered with errno %d", errno)
	}
	if n := len(mem.requests()); n != begun+1 {
		t.Errorf("the plugin had the write %d times, want twice", n-begun+1)
	}
}
