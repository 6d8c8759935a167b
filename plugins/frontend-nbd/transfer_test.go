package main

import (
	"bytes"
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// relay is two front ends with one disk. A connection begins at the first one, and
// move takes it to the other.
type relay struct {
	t    testing.TB
	rigs [2]*rig
	at   int
}

func newRelay(t testing.TB, c rigConfig) *relay {
	l := &relay{t: t}
	for i := range l.rigs {
		l.rigs[i] = newRig(t, c)
	}
	l.rigs[1].disks[0].mem = l.rigs[0].disks[0].mem
	return l
}

// failing has requests end as f says.
func (d *disk) failing(f func(*shm.SQE) blk.Errno) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fails = f
}

func (l *relay) disk() *disk { return l.rigs[0].disks[0] }

func release(t testing.TB, r *rig) []plugin.Connection {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	all, closed, err := r.f.ReleaseConnections(ctx)
	if err != nil || closed != 0 {
		t.Fatalf("%d connections closed, error %v", closed, err)
	}
	return all
}

func serve(t testing.TB, r *rig, all []plugin.Connection) {
	t.Helper()
	if err := r.f.AdoptConnections(context.Background(), all); err != nil {
		t.Fatal(err)
	}
	if err := r.f.ServeConnections(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// move moves the one connection to the other front end.
func (l *relay) move() {
	l.t.Helper()
	all := release(l.t, l.rigs[l.at])
	if len(all) != 1 || all[0].Device != "disk0" {
		l.t.Fatalf("released: %+v", all)
	}
	if n := l.rigs[l.at].f.Openers(0); n != 0 || !l.rigs[l.at].free(0) {
		l.t.Fatalf("%d openers are left, or slots", n)
	}
	l.at = 1 - l.at
	serve(l.t, l.rigs[l.at], all)
}

// awaitRead waits until the front end has read what the client has sent.
func awaitRead(t testing.TB, c net.Conn) {
	t.Helper()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the bytes are read", func() (all bool) {
		raw.Control(func(fd uintptr) {
			n, err := unix.IoctlGetInt(int(fd), unix.TIOCOUTQ)
			all = err == nil && n == 0
		})
		return all
	})
}

// sentCommand is a command of a stream.
type sentCommand struct {
	cmd, flags uint16
	off        uint64
	n          int
}

// handedStream is a sequence of commands that touches each kind of state: parts of blocks,
// payload of several slots, refused commands with and without payload.
var handedStream = []sentCommand{
	{nbdwire.CmdWrite, 0, 700, 100},
	{nbdwire.CmdWrite, nbdwire.CmdFlagFUA, 3 << 10, 9<<10 + 300},
	{nbdwire.CmdRead, 0, 512, 11 << 10},
	{nbdwire.CmdWrite, 0, 1 << 40, 600}, // beyond the end
	{nbdwire.CmdBlockStatus, 0, 300, 9<<10 + 300},
	{nbdwire.CmdFlush, 0, 0, 0},
	{nbdwire.CmdWriteZeroes, nbdwire.CmdFlagNoHole, 4<<10 + 100, 3000},
	{nbdwire.CmdBlockStatus, nbdwire.CmdFlagReqOne, 40<<10 + 1, 4 << 10},
	{77, 0, 0, 0}, // unknown
	{nbdwire.CmdTrim, 0, 40 << 10, 4 << 10},
	{nbdwire.CmdRead, 0, 3 << 10, 9<<10 + 300},
}

// prepare returns the bytes of the stream, its calls, and where commands end.
func (c *client) prepare(seed uint64) (b []byte, calls []*call, ends []int) {
	for i, s := range handedStream {
		p := &call{off: s.off, n: s.n, done: make(chan struct{})}
		if s.cmd == nbdwire.CmdRead {
			p.buf = make([]byte, s.n)
		}
		c.mu.Lock()
		c.cookie++
		c.pending[c.cookie] = p
		b = append(b, command(s.cmd, s.flags, c.cookie, s.off, uint32(s.n))...)
		c.mu.Unlock()
		if s.cmd == nbdwire.CmdWrite {
			b = append(b, pattern(s.n, seed+uint64(i))...)
		}
		calls, ends = append(calls, p), append(ends, len(b))
	}
	return b, calls, ends
}

// judge waits for the answers of a stream, and looks at what the disk has.
func (l *relay) judge(t *testing.T, calls []*call, seed uint64, structured bool) {
	t.Helper()
	for i, p := range calls {
		code, err := p.wait()
		want := uint32(0)
		switch handedStream[i].off {
		case 1 << 40:
			want = nbdErrno(blk.ENOSPC)
		case 0:
			if handedStream[i].cmd == 77 {
				want = nbdErrno(blk.EINVAL)
			}
		}
		if handedStream[i].cmd == nbdwire.CmdBlockStatus && !structured {
			want = nbdErrno(blk.EINVAL)
		}
		if err != nil || code != want {
			t.Fatalf("command %d (%+v): code %d, error %v, want code %d", i, handedStream[i], code, err, want)
		}
		if n := len(p.list); handedStream[i].flags&nbdwire.CmdFlagReqOne != 0 && structured && n != 1 {
			t.Fatalf("command %d: %d extents, one was asked for", i, n)
		}
	}
	want := pattern(9<<10+300, seed+1)
	clear(want[1<<10+100:][:3000])
	for _, r := range l.rigs {
		r.disks[0].mu.Lock()
		defer r.disks[0].mu.Unlock()
	}
	mem := l.disk().mem
	if !bytes.Equal(mem[3<<10:][:len(want)], want) || !bytes.Equal(mem[700:800], pattern(100, seed)) {
		t.Fatal("the disk has other data")
	}
	if last := calls[len(calls)-1].buf; len(last) != len(want) {
		t.Fatal("a read of another size")
	}
}

var handedRig = rigConfig{slots: 8, slotSize: 8 << 10, limits: blk.Limits{
	Size: 64 << 10, LogicalBlockSize: 512, PhysicalBlockSize: 4096, MaxIOSize: 4 << 10, MaxDiscard: 2 << 10, MaxWriteZeroes: 1 << 10, WriteCache: true, FUA: true,
}}

// A connection changes the process at each byte of a stream of commands.
func TestHanded_AtEachByte(t *testing.T) {
	bothReplies(t, func(t *testing.T, structured bool) {
		l := newRelay(t, handedRig)
		c := l.rigs[0].connect(structured)
		b, _, ends := c.prepare(0)
		c.pending = map[uint64]*call{}
		var cuts []int
		for cut := range len(b) + 1 {
			near := slices.ContainsFunc(ends, func(end int) bool { return cut-end < 40 && end-cut < 40 }) || cut < 140
			if near || cut%61 == 0 {
				cuts = append(cuts, cut)
			}
		}
		for _, cut := range cuts {
			seed := uint64(1000 + cut)
			b, calls, _ := c.prepare(seed)
			c.must(c.conn.Write(b[:cut]))
			awaitRead(t, c.conn)
			l.move()
			c.must(c.conn.Write(b[cut:]))
			l.judge(t, calls, seed, structured)
		}
		t.Logf("%d cuts", len(cuts))
	})
}

// It changes several times within one stream, wherever the reading is.
func TestHanded_ManyTimes(t *testing.T) {
	bothReplies(t, func(t *testing.T, structured bool) {
		l := newRelay(t, handedRig)
		c := l.rigs[0].connect(structured)
		rnd := rand.New(rand.NewPCG(7, 7))
		for round := range 10 {
			seed := uint64(round)
			b, calls, _ := c.prepare(seed)
			for len(b) > 0 {
				n := min(len(b), 1+rnd.IntN(900))
				c.must(c.conn.Write(b[:n]))
				b = b[n:]
				if rnd.IntN(2) > 0 {
					awaitRead(t, c.conn)
				}
				l.move()
			}
			l.judge(t, calls, seed, structured)
		}
	})
}

// Replies that the client has not read go on where they were cut.
func TestHanded_UnsentReplies(t *testing.T) {
	bothReplies(t, func(t *testing.T, structured bool) {
		l := newRelay(t, rigConfig{slots: 32, slotSize: 64 << 10})
		c := dial(t, "unix", l.rigs[0].addr, "disk0", structured) // nobody reads
		want := pattern(4<<20, 5)
		l.disk().mu.Lock()
		copy(l.disk().mem, want)
		l.disk().mu.Unlock()
		var calls []*call
		for i := range 40 {
			off := i * 70001 % (3 << 20)
			n := 1 + i*9973%200000
			calls = append(calls, c.start(nbdwire.CmdRead, 0, uint64(off), n, make([]byte, n)))
		}
		for range 4 {
			time.Sleep(5 * time.Millisecond) // replies fill the socket and the slots
			l.move()
		}
		go c.run()
		for i, p := range calls {
			if code, err := p.wait(); code != 0 || err != nil {
				t.Fatalf("read %d: code %d, error %v", i, code, err)
			}
			if !bytes.Equal(p.buf, want[p.off:][:len(p.buf)]) {
				t.Fatalf("read %d has other data", i)
			}
		}
	})
}

// A command that has failed in part fails, whoever answers it.
func TestHanded_FailedInPart(t *testing.T) {
	l := newRelay(t, handedRig)
	c := l.rigs[0].connect(true)
	l.disk().failing(func(e *shm.SQE) blk.Errno {
		if e.Op == blk.Write && e.Offset == 0 {
			return blk.EIO
		}
		return blk.OK
	})
	p := c.start(nbdwire.CmdWrite, 0, 0, 12<<10, []byte{}) // no payload yet
	payload := pattern(12<<10, 1)
	c.must(c.conn.Write(payload[:9<<10]))
	awaitRead(t, c.conn)
	l.move()
	c.must(c.conn.Write(payload[9<<10:]))
	if code, err := p.wait(); err != nil || code != nbdErrno(blk.EIO) {
		t.Errorf("code %d, error %v", code, err)
	}
	if code := c.write(4096, payload[:512]); code != 0 {
		t.Errorf("the next command: %d", code)
	}
}

// Requests in flight are answered by the process that has them, and carried out once.
func TestHanded_InFlight(t *testing.T) {
	l := newRelay(t, rigConfig{})
	c := l.rigs[0].connect(false)
	for _, r := range l.rigs {
		r.disks[0].mu.Lock()
		r.disks[0].keep = true
		r.disks[0].mu.Unlock()
	}
	var calls []*call
	for i := range 200 {
		calls = append(calls, c.start(nbdwire.CmdWrite, 0, uint64(i)*4096, 4096, pattern(4096, uint64(i))))
		if i%50 == 25 {
			l.move()
		}
	}
	for i, p := range calls {
		if code, err := p.wait(); code != 0 || err != nil {
			t.Fatalf("write %d: code %d, error %v", i, code, err)
		}
	}
	seen := map[uint64]int{}
	for _, r := range l.rigs {
		d := r.disks[0]
		d.mu.Lock()
		for _, e := range d.log {
			seen[e.Offset]++
		}
		d.mu.Unlock()
	}
	for i := range calls {
		if n := seen[uint64(i)*4096]; n != 1 {
			t.Errorf("write %d was carried out %d times", i, n)
		}
	}
}

// awaitInDevice waits until the device has a request of any connection.
func (r *rig) awaitInDevice() {
	r.t.Helper()
	eventually(r.t, "it is with the device", func() (busy bool) {
		r.onQueue(0, func(q *queue) {
			busy = slices.ContainsFunc(q.conns, func(c *conn) bool { return c.inDevice() > 0 })
		})
		return busy
	})
}

// A request that does not end keeps all connections where they are.
func TestHanded_NotWhileARequestHangs(t *testing.T) {
	r := newRig(t, rigConfig{})
	c, other := r.connect(true), r.connect(true)
	block := make(chan struct{})
	r.disks[0].failing(func(*shm.SQE) blk.Errno { <-block; return blk.OK })
	p := c.start(nbdwire.CmdRead, 0, 0, 512, make([]byte, 512))
	r.awaitInDevice()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := r.f.ReleaseConnections(ctx); blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("error %v, want EBUSY", err)
	}
	close(block)
	if code, err := p.wait(); code != 0 || err != nil {
		t.Errorf("code %d, %v", code, err)
	}
	buf := make([]byte, 512)
	if code := other.read(0, buf); code != 0 {
		t.Errorf("the other one: %d", code)
	}
	if code := r.connect(false).read(0, buf); code != 0 { // and new ones are accepted
		t.Errorf("a new one: %d", code)
	}
}

// A connection that comes while others are given up waits, or is closed; the process
// that takes its own back serves all again.
func TestHanded_TakenBack(t *testing.T) {
	r := newRig(t, rigConfig{})
	c := r.connect(true)
	if code := c.write(0, pattern(512, 1)); code != 0 {
		t.Fatal(code)
	}
	all := release(t, r)
	late := c.start(nbdwire.CmdRead, 0, 0, 512, make([]byte, 512))
	time.Sleep(20 * time.Millisecond)
	serve(t, r, all)
	if code, err := late.wait(); code != 0 || err != nil || !bytes.Equal(late.buf, pattern(512, 1)) {
		t.Errorf("code %d, %v", code, err)
	}
	r.listen()
	if code := r.connect(false).read(0, make([]byte, 512)); code != 0 {
		t.Errorf("a new one: %d", code)
	}
}

// Clients that are done get the rest of their replies.
func TestHanded_Draining(t *testing.T) {
	l := newRelay(t, rigConfig{})
	c := dial(t, "unix", l.rigs[0].addr, "disk0", true)
	p := c.start(nbdwire.CmdRead, 0, 0, 3<<20, make([]byte, 3<<20))
	c.must(c.conn.Write(command(nbdwire.CmdDisc, 0, 99, 0, 0)))
	time.Sleep(10 * time.Millisecond)
	l.move()
	go c.run()
	if code, err := p.wait(); code != 0 || err != nil {
		t.Errorf("code %d, %v", code, err)
	}
	eventually(t, "the connection is closed", func() bool { return l.rigs[1].f.Openers(0) == 0 })
}

// A client that rules let only read, and of which events are kept, stays one.
func TestHanded_Rights(t *testing.T) {
	l := newRelay(t, rigConfig{})
	c := l.rigs[0].connect(true)
	eventually(t, "the connection is served", func() (served bool) { // it is handed to the queue after the handshake
		l.rigs[0].onQueue(0, func(q *queue) {
			if served = len(q.conns) == 1; served {
				q.conns[0].readOnly = true
				q.conns[0].user = &nbdUser{events: &l.rigs[0].f.users, peer: "x", listener: "tcp:1"}
			}
		})
		return served
	})
	for turn := range 2 { // there and back
		l.move()
		if code := c.write(0, pattern(512, 1)); code != nbdErrno(blk.EPERM) {
			t.Errorf("turn %d: a client that may only read writes: code %d", turn, code)
		}
		if code := c.read(0, make([]byte, 512)); code != 0 {
			t.Errorf("turn %d: a read has code %d", turn, code)
		}
		events, _ := l.rigs[l.at].f.TakeUsers()
		opens := func(e plugin.UserEvent) bool {
			return e.Event == plugin.UserOpens && e.Listener == "tcp:1" && e.Mode == modeOf(true)
		}
		if !slices.ContainsFunc(events, opens) {
			t.Errorf("turn %d: the events are %+v", turn, events)
		}
	}
}

// States that lie are refused, and nothing of them is left.
func TestHanded_Lies(t *testing.T) {
	r := newRig(t, rigConfig{})
	good := `{"version":1,"peer":"p"`
	memfd := func(n int) int {
		fd, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
		if err == nil {
			_, err = unix.Write(fd, make([]byte, n))
		}
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	event := func() int {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		return fd
	}
	for name, v := range map[string]struct {
		device, state string
		fds           func(sock int) []int
	}{
		"no state":                             {state: ""},
		"another version":                      {state: `{"version":2}`},
		"another device":                       {device: "disk9", state: good + `}`},
		"bytes without a file":                 {state: good + `,"received":28}`},
		"a file without bytes":                 {state: good + `}`, fds: func(s int) []int { return []int{s, memfd(1)} }},
		"less bytes than announced":            {state: good + `,"received":28}`, fds: func(s int) []int { return []int{s, memfd(27)} }},
		"more bytes than announced":            {state: good + `,"unsent":28}`, fds: func(s int) []int { return []int{s, memfd(29)} }},
		"too many bytes":                       {state: good + `,"unsent":99999999999}`, fds: func(s int) []int { return []int{s, memfd(28)} }},
		"a sum that overflows":                 {state: good + `,"received":9223372036854775807,"unsent":9223372036854775807}`, fds: func(s int) []int { return []int{s, memfd(28)} }},
		"less than nothing":                    {state: good + `,"received":-28,"unsent":28}`, fds: func(s int) []int { return []int{s, memfd(28)} }},
		"an errno of no command":               {state: good + `,"errno":5}`},
		"a header of no command":               {state: good + `,"headed":true,"received":27}`, fds: func(s int) []int { return []int{s, memfd(27)} }},
		"bytes in no file":                     {state: good + `,"received":28}`, fds: func(s int) []int { return []int{s, event()} }},
		"a context without structured replies": {state: good + `,"allocation":true}`},
		"no socket":                            {state: good + `}`, fds: func(s int) []int { unix.Close(s); return []int{event()} }},
	} {
		t.Run(name, func(t *testing.T) {
			sock, peer := pair(t)
			defer peer.Close()
			sound, soundPeer := pair(t)
			defer soundPeer.Close()
			if v.device == "" {
				v.device = "disk0"
			}
			bad := plugin.Connection{Device: v.device, State: []byte(v.state), FDs: []int{sock}}
			if v.fds != nil {
				bad.FDs = v.fds(sock)
			}
			all := []plugin.Connection{{Device: "disk0", State: []byte(good + "}"), FDs: []int{sound}}, bad}
			if err := r.f.AdoptConnections(context.Background(), all); err == nil {
				t.Error("no error")
			}
			if n := r.f.Openers(0); n != 0 {
				t.Errorf("%d openers", n)
			}
			soundPeer.SetReadDeadline(time.Now().Add(20 * time.Second))
			if _, err := soundPeer.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
				t.Errorf("the socket of another one stays open: %v", err)
			}
		})
	}
}

// FuzzHanded adopts whatever a state says, with bytes that say anything: nothing
// panics, and the slots come back.
func FuzzHanded(f *testing.F) {
	f.Add([]byte(`{"version":1,"received":28,"headed":true}`), command(nbdwire.CmdRead, 0, 1, 0, 512))
	f.Add([]byte(`{"version":1,"received":28,"errno":5}`), command(nbdwire.CmdWrite, 0, 1, 0, 512))
	f.Add([]byte(`{"version":1,"received":28,"draining":true}`), command(nbdwire.CmdRead, 0, 1, 0, 512))
	f.Add([]byte(`{"version":1,"received":28,"structured":true,"allocation":true}`), command(nbdwire.CmdBlockStatus, 0, 1, 100, 5000))
	f.Fuzz(func(t *testing.T, state, b []byte) {
		r := newRig(t, rigConfig{slots: 4})
		sock, peer := pair(t)
		c := plugin.Connection{Device: "disk0", State: state, FDs: []int{sock}}
		if len(b) > 0 {
			fd, _ := unix.MemfdCreate("test", unix.MFD_CLOEXEC)
			unix.Write(fd, b)
			c.FDs = append(c.FDs, fd)
		}
		if r.f.AdoptConnections(context.Background(), []plugin.Connection{c}) == nil {
			r.f.ServeConnections(context.Background())
		}
		peer.Close()
		eventually(t, "slots are back", func() bool { return r.f.Openers(0) == 0 && (len(r.f.exportAt(0).currentShares()) == 0 || r.free(0)) })
	})
}

// A connection with TLS ends, and those without go on.
func TestHanded_TLSIsClosed(t *testing.T) {
	r := newRig(t, rigConfig{})
	plain := r.connect(true)
	a := newAuthority(t)
	must(t, "set TLS", r.f.SetTLS(t.Context(), a.server(false, false)))
	s, err := upgrade(greeted(t, "unix", r.addr), a.member("web"))
	must(t, "start TLS", err)
	mustAsk(t, s, nbdwire.OptGo, goData("disk0"), nbdwire.RepInfo)
	eventually(t, "it is served", func() bool { return r.f.Openers(0) == 2 })
	all, closed, err := r.f.ReleaseConnections(t.Context())
	if err != nil || len(all) != 1 || closed != 1 {
		t.Fatalf("%d connections, %d closed, %v", len(all), closed, err)
	}
	serve(t, r, all)
	if code := plain.read(0, make([]byte, 512)); code != 0 {
		t.Error(code)
	}
	eventually(t, "one is left", func() bool { return r.f.Openers(0) == 1 })
}
