package iwarp

import (
	"context"
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func TestI002_ListenerAnswersByHand(t *testing.T) {
	s := newEnd(t, DefaultConfig())
	l := listen(t, s.dev)
	hasty := listen(t, openDevice(t, Config{CRC: true, RequestTimeout: 100 * time.Millisecond})) // for incomplete requests
	good := func() mpaFrame { return s.dev.cfg.mpaRequest(nil) }
	markers := good()
	markers.flags |= mpaMarkers
	newer := good()
	newer.rev = 3
	first := good()
	for name, tt := range map[string]struct {
		send   []byte
		reject bool
		to     verbs.Listener
	}{
		"markers are refused":                   {markers.encode(mpaKeyRequest), true, l},
		"revision 3 is closed":                  {newer.encode(mpaKeyRequest), false, l},
		"reply key is closed":                   {first.encode(mpaKeyReply), false, l},
		"half a request is closed in time":      {first.encode(mpaKeyRequest)[:19], false, hasty},
		"private data cut short is closed":      {first.encode(mpaKeyRequest)[:30], false, hasty},
		"nothing at all is closed in time":      {nil, false, hasty},
		"bytes behind the request are closed":   {append(first.encode(mpaKeyRequest), 0), false, l},
		"a peer without the block is refused":   {(&mpaFrame{rev: 2, flags: mpaEnhanced, private: make([]byte, 4)}).encode(mpaKeyRequest), true, l},
		"revision 1 without block is refused":   {(&mpaFrame{rev: 1}).encode(mpaKeyRequest), true, l},
		"enhanced without its words is refused": {(&mpaFrame{rev: 2, flags: mpaEnhanced}).encode(mpaKeyRequest), true, l},
	} {
		p := dialRaw(t, tt.to.Addr())
		p.conn.Write(tt.send)
		rep, err := readMPA(p.conn, mpaKeyReply)
		if tt.reject != (err == nil) || tt.reject && (!rep.hasFlag(mpaReject) || rep.hasFlag(mpaMarkers)) {
			t.Errorf("%s: %+v, %v", name, rep, err)
		}
		if _, err := p.conn.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Errorf("%s: still open: %v", name, err)
		}
	}
	// None of them reached Accept: the first one that does is this.
	done := acceptOne(t, l, s.qp)
	dialRaw(t, l.Addr()).open()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestI002_RequestByteByByte(t *testing.T) {
	s := newEnd(t, DefaultConfig())
	l := listen(t, s.dev)
	done := acceptOne(t, l, s.qp)
	p := dialRaw(t, l.Addr())
	req := s.dev.cfg.mpaRequest([]byte("x"))
	for _, b := range req.encode(mpaKeyRequest) {
		p.conn.Write([]byte{b})
		runtime.Gosched()
	}
	if rep, err := readMPA(p.conn, mpaKeyReply); err != nil || rep.hasFlag(mpaReject) {
		t.Errorf("%+v, %v", rep, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestI002_InitiatorGivesUp(t *testing.T) {
	cfg := DefaultConfig()
	cfg.ReplyTimeout = 50 * time.Millisecond
	if _, _, err := clientToRaw(t, cfg, func(mpaFrame, net.Conn) {}); err == nil || !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err) {
		t.Errorf("no reply: %v", err)
	}
	if _, _, err := clientToRaw(t, cfg, func(_ mpaFrame, c net.Conn) { c.Close() }); err == nil {
		t.Error("connected to a peer that closes")
	}
	p, _, err := clientToRaw(t, DefaultConfig(), func(_ mpaFrame, c net.Conn) {
		f := mpaFrame{flags: mpaEnhanced | mpaCRC, rev: 2, private: append(readDepths{ord: 100}.append(nil), "RNBD\x01\x03\x00\x00"...)}
		c.Write(f.encode(mpaKeyReply))
	})
	var te *termError
	if !errors.As(err, &te) || te.code != termIRD {
		t.Errorf("peer that reads too much: %v", err)
	}
	if f, err := p.hear(); err != nil || fpduHeader(f).op() != opTerminate || f[fpduUntagged] != 0x20 || f[fpduUntagged+1] != 6 {
		t.Errorf("peer that reads too much is told %x, %v", f, err)
	}
}

// The end of a context is a deadline of the connection, whenever it comes.
func TestI002_CancelledInitiatorReturnsAtOnce(t *testing.T) {
	nl, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer nl.Close()
	conn, err := net.Dial("tcp", nl.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.SetDeadline(time.Unix(1, 0))
	if _, _, err := newEnd(t, DefaultConfig()).dev.initiateMPA(&startupConn{TCPConn: conn.(*net.TCPConn)}, nil); !isTimeout(err) {
		t.Errorf("%v", err)
	}
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

// siw's consumer may speak as soon as it has accepted.
func TestI005_EarlyFrameBehindTheReplyIsTaken(t *testing.T) {
	_, c, err := clientToRaw(t, DefaultConfig(), func(req mpaFrame, conn net.Conn) {
		cfg := DefaultConfig()
		tm, _, d, _ := cfg.checkRequest(&req)
		rep := cfg.mpaReply(&req, tm, d, false, nil)
		conn.Write(append(rep.encode(mpaKeyReply), segment{op: opSend, msn: 1}.bytes(true)...))
	})
	if err != nil {
		t.Fatal(err)
	}
	c.recv(verbs.RecvWR{ID: 3})
	if wc := c.next(); wc.ID != 3 || wc.Op != verbs.OpRecv || wc.Status != verbs.StatusOK {
		t.Errorf("%+v", wc)
	}
}

func TestI005_ResponderHoldsBackUntilTheFirstFrame(t *testing.T) {
	p, s := rawToServer(t, DefaultConfig())
	s.send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
	for range 20 {
		s.poll()
	}
	p.conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	if f, err := p.hear(); err == nil {
		t.Fatalf("responder spoke first: %x", f)
	}
	p.conn.SetReadDeadline(time.Now().Add(testLimit))
	p.say(segment{op: opWrite, stag: emptySTag})
	if wc := s.next(); wc.ID != 1 || wc.Status != verbs.StatusOK {
		t.Errorf("%+v", wc)
	}
	if f, err := p.hear(); err != nil || fpduHeader(f).op() != opSend {
		t.Errorf("%x, %v", f, err)
	}
}

func TestI005_EmptyWriteOpensTheResponder(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	c.recv(verbs.RecvWR{ID: 4})
	s.send(verbs.SendWR{ID: 1, Op: verbs.OpWriteImm, Imm: 3, Signaled: true})
	if wc := c.next(s); wc.ID != 4 || wc.Imm != 3 {
		t.Errorf("%+v", wc)
	}
}

func TestI005_ForeignResponderIsPoked(t *testing.T) {
	cfg := Config{Foreign: true}
	p, c, err := clientToRaw(t, cfg, agree)
	if err != nil {
		t.Fatal(err)
	}
	isPoke := func(f []byte) bool {
		h := fpduHeader(f)
		return h.op() == opWrite && h.payload() == 0 && h.last() && h.stag() == emptySTag
	}
	start := time.Now()
	sleeper := make(chan struct{})
	go func() { // the owner sleeps in between: the queue has to wake it
		defer close(sleeper)
		c.sleepUntil(func() bool { return c.qp.(*qp).terms.poke == false })
	}()
	for i := range 3 { // the opening, then two pokes
		if f, err := p.hear(); err != nil || !isPoke(f) {
			t.Fatalf("frame %d is %x, %v", i, f, err)
		}
	}
	if d := time.Since(start); d < 50*time.Millisecond || d > 4*time.Second {
		t.Errorf("second poke after %s", d)
	}
	p.say(segment{op: opWrite, stag: emptySTag})
	<-sleeper
	heard := func(wait time.Duration) bool {
		p.conn.SetReadDeadline(time.Now().Add(wait))
		_, err := p.hear()
		return err == nil
	}
	for heard(50 * time.Millisecond) { // it was poked before it spoke
	}
	for stop := time.Now().Add(250 * time.Millisecond); time.Now().Before(stop); {
		if c.poll(); heard(5 * time.Millisecond) {
			t.Fatal("poked a peer that is awake")
		}
	}
}

// sleepLimit is how long an owner does its work, and how long it may sleep.
const sleepLimit = time.Minute

// sleepUntil is an owner that sleeps in poll(2) whenever Arm lets it.
func (e *end) sleepUntil(done func() bool) {
	for stop := time.Now().Add(sleepLimit); !done() && time.Now().Before(stop); {
		if e.poll() > 0 || done() || !e.cq.Arm() {
			continue
		}
		fds := []unix.PollFd{{Fd: int32(e.cq.FD()), Events: unix.POLLIN}}
		if n, err := unix.Poll(fds, int(sleepLimit.Milliseconds())); n == 0 && err == nil {
			e.t.Error("nothing woke the owner")
			return
		}
	}
}

func TestI006_HowThePeerEnds(t *testing.T) {
	half := segment{op: opSend, msn: 1, payload: some}.bytes(true)
	for name, tt := range map[string]struct {
		act  func(p *rawPeer)
		want verbs.Status
	}{
		"FIN between frames":           {func(p *rawPeer) { p.conn.CloseWrite() }, verbs.StatusOK},
		"FIN after a frame":            {func(p *rawPeer) { p.say(segment{op: opWrite}); p.conn.CloseWrite() }, verbs.StatusOK},
		"FIN inside a frame":           {func(p *rawPeer) { p.conn.Write(half[:23]); p.conn.CloseWrite() }, verbs.StatusFatal},
		"FIN inside a header":          {func(p *rawPeer) { p.conn.Write(half[:3]); p.conn.CloseWrite() }, verbs.StatusFatal},
		"FIN inside a message":         {func(p *rawPeer) { p.say(segment{op: opSend, more: true, msn: 1, payload: some}); p.conn.CloseWrite() }, verbs.StatusFatal},
		"RST":                          {func(p *rawPeer) { p.conn.SetLinger(0); p.conn.Close() }, verbs.StatusFatal},
		"Terminate: access":            {func(p *rawPeer) { p.say(terminateOf(termSTag)) }, verbs.StatusRemoteAccess},
		"Terminate: opcode":            {func(p *rawPeer) { p.say(terminateOf(termOpcode)) }, verbs.StatusRemoteInvalid},
		"Terminate: no receive":        {func(p *rawPeer) { p.say(terminateOf(termNoBuffer)) }, verbs.StatusRetryExceeded},
		"Terminate: CRC":               {func(p *rawPeer) { p.say(terminateOf(termCRC)) }, verbs.StatusFatal},
		"Terminate in siw's layout":    {func(p *rawPeer) { p.say(segment{op: opTerminate, msn: 1, payload: unhex("1100030000000000")}) }, verbs.StatusRemoteAccess},
		"Terminate then reset at once": {func(p *rawPeer) { p.say(terminateOf(termSTag)); p.conn.SetLinger(0); p.conn.CloseWrite() }, verbs.StatusRemoteAccess},
	} {
		t.Run(name, func(t *testing.T) {
			p, s := rawToServer(t, DefaultConfig())
			buf, mr := s.region(8, 0)
			s.recv(verbs.RecvWR{ID: 1, Buf: buf, LKey: mr.LKey()}, verbs.RecvWR{ID: 2})
			s.send(verbs.SendWR{ID: 3, Op: verbs.OpSend}) // held back
			s.poll()
			tt.act(p)
			all := s.ended()
			last := all[len(all)-1]
			if last.Status != tt.want {
				t.Errorf("ended with status %d, want %d", last.Status, tt.want)
			}
			checkFlushed(t, all, []uint64{1, 2}, []uint64{3})
			if s.poll() != 0 || len(s.wcs) != 0 {
				t.Error("something came behind OpDisconnected")
			}
			if _, err := s.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend}}); !errors.Is(err, verbs.ErrNotConnected) {
				t.Errorf("PostSend after the end: %v", err)
			}
			if _, err := s.qp.PostRecv([]verbs.RecvWR{{}}); !errors.Is(err, verbs.ErrNotConnected) {
				t.Errorf("PostRecv after the end: %v", err)
			}
		})
	}
}

func (e *end) q() *qp { return e.qp.(*qp) }

func terminateOf(c termCode) segment {
	var b [maxTerminateLen]byte
	n := putTerminate(b[:], c, &faultySegment{})
	return segment{op: opTerminate, msn: 1, payload: b[:n]}
}

// checkFlushed: each receive comes once and flushed, each send at most once
// (an unsignalled one that was sent may not), OpDisconnected last.
func checkFlushed(t *testing.T, all []verbs.WC, recvs, sends []uint64) {
	t.Helper()
	var gotRecvs, gotSends []uint64
	for i, wc := range all {
		switch {
		case wc.Op == verbs.OpDisconnected:
			if i != len(all)-1 {
				t.Error("OpDisconnected is not the last")
			}
		case wc.Op == verbs.OpRecv:
			gotRecvs = append(gotRecvs, wc.ID)
		default:
			gotSends = append(gotSends, wc.ID)
		}
	}
	if !slices.Equal(gotRecvs, recvs) {
		t.Errorf("receives %d, want %d", gotRecvs, recvs)
	}
	for _, id := range gotSends {
		if !slices.Contains(sends, id) {
			t.Errorf("send %d is not outstanding", id)
		}
	}
}

func TestI006_EndWithAReadOutstanding(t *testing.T) {
	p, c, err := clientToRaw(t, DefaultConfig(), agree)
	if err != nil {
		t.Fatal(err)
	}
	buf, r := c.region(64, 0)
	read := verbs.SendWR{ID: 1, Op: verbs.OpRead, Signaled: true, RemoteAddr: 1, RKey: 1, SGEs: []verbs.SGE{{Buf: buf, LKey: r.LKey()}}}
	behind := verbs.SendWR{ID: 2, Op: verbs.OpSend}
	c.send(read, behind)
	c.poll()
	p.hear()
	p.say(terminateOf(termReadSTag))
	want := []verbs.WC{
		{ID: 1, QP: 1, Op: verbs.OpRead, Status: verbs.StatusRemoteAccess, VendorCode: uint32(termReadSTag)},
		{ID: 2, QP: 1, Op: verbs.OpSend, Status: verbs.StatusFlushed, VendorCode: uint32(termReadSTag)},
		{QP: 1, Op: verbs.OpDisconnected, Status: verbs.StatusRemoteAccess, VendorCode: uint32(termReadSTag)},
	}
	if got := c.ended(); !slices.Equal(got, want) {
		t.Errorf("\n got %+v\nwant %+v", got, want)
	}

	p, c, err = clientToRaw(t, DefaultConfig(), agree)
	if err != nil {
		t.Fatal(err)
	}
	buf, r = c.region(64, 0)
	read.SGEs = []verbs.SGE{{Buf: buf, LKey: r.LKey()}}
	c.send(read)
	c.poll()
	p.hear()
	p.conn.CloseWrite()
	want = []verbs.WC{{ID: 1, QP: 1, Op: verbs.OpRead, Status: verbs.StatusFlushed}, {QP: 1, Op: verbs.OpDisconnected, Status: verbs.StatusFatal}}
	if got := c.ended(); !slices.Equal(got, want) {
		t.Errorf("FIN:\n got %+v\nwant %+v", got, want)
	}
}

func TestRNR_TheMessageTimesOut(t *testing.T) {
	cfg := DefaultConfig()
	cfg.RNRTimeout = 30 * time.Millisecond
	p, s := rawToServer(t, cfg)
	p.say(segment{op: opSend, msn: 1, payload: some})
	woken := make(chan struct{})
	go func() {
		defer close(woken)
		s.sleepUntil(func() bool { return len(s.wcs) > 0 })
	}()
	if c := p.hearTerminate(); c != termNoBuffer {
		t.Errorf("terminated %s", c)
	}
	<-woken
	if wc := s.next(); wc.Op != verbs.OpDisconnected || wc.Status != verbs.StatusRetryExceeded {
		t.Errorf("%+v", wc)
	}
}

func TestRNR_TheSocketIsNotReadMeanwhile(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	for i := range 40 {
		c.send(verbs.SendWR{ID: uint64(i), Op: verbs.OpWriteImm, Imm: uint32(i), Signaled: true})
	}
	for range 50 {
		c.poll()
		s.poll()
	}
	if len(s.wcs) != 0 {
		t.Fatalf("%d completions without a receive", len(s.wcs))
	}
	armed := false
	for range 3 { // the first may find stale edges
		s.poll()
		armed = armed || s.cq.Arm()
	}
	if !armed {
		t.Error("a message that waits for a receive keeps the owner awake")
	}
	for i := range 40 {
		s.recv(verbs.RecvWR{ID: uint64(i)})
		if s.cq.Arm() {
			t.Fatal("Arm sleeps over a message that can be delivered")
		}
		if wc := s.next(c); wc.Imm != uint32(i) {
			t.Fatalf("message %d is %+v", i, wc)
		}
	}
}

func TestRNR_ThePeerGoesMeanwhile(t *testing.T) {
	for name, leave := range map[string]func(p *rawPeer){
		"FIN":                     func(p *rawPeer) { p.conn.Close() },
		"RST":                     func(p *rawPeer) { p.conn.SetLinger(0); p.conn.Close() },
		"FIN and a receive after": func(p *rawPeer) { p.conn.Close() },
	} {
		p, s := rawToServer(t, DefaultConfig())
		p.say(segment{op: opSend, msn: 1})
		for s.q().rnrSince == 0 {
			s.poll()
		}
		leave(p)
		if name == "FIN and a receive after" {
			s.poll()
			s.recv(verbs.RecvWR{ID: 5})
			if wc := s.next(); wc.ID != 5 || wc.Status != verbs.StatusOK {
				t.Errorf("%s: %+v", name, wc)
			}
			if wc := s.next(); wc.Op != verbs.OpDisconnected || wc.Status != verbs.StatusOK {
				t.Errorf("%s: %+v", name, wc)
			}
			continue
		}
		start := time.Now()
		s.sleepUntil(func() bool { return len(s.wcs) > 0 })
		if wc := s.next(); wc.Op != verbs.OpDisconnected || wc.Status != verbs.StatusFatal || time.Since(start) > 4*time.Second {
			t.Errorf("%s: %+v after %s", name, wc, time.Since(start))
		}
	}
}

// A receive that is posted before the owner finds the wait over is in time.
func TestRNR_AReceiveGoesBeforeTheTimer(t *testing.T) {
	for name, gone := range map[string]bool{"the peer waits": false, "the peer has gone": true} {
		p, s := rawToServer(t, DefaultConfig())
		p.say(segment{op: opSend, msn: 1})
		for s.q().rnrSince == 0 {
			s.poll()
		}
		if gone {
			p.conn.Close()
			for !s.q().hangup {
				s.poll()
			}
		}
		s.recv(verbs.RecvWR{ID: 5}, verbs.RecvWR{ID: 6})
		s.q().setDeadline(1)
		if wc := s.next(); wc.ID != 5 || wc.Status != verbs.StatusOK {
			t.Errorf("%s: %+v", name, wc)
		}
		want := verbs.StatusFlushed
		if !gone {
			p.say(segment{op: opSend, msn: 2})
			want = verbs.StatusOK
		}
		if wc := s.next(); wc.ID != 6 || wc.Status != want {
			t.Errorf("%s: %+v", name, wc)
		}
	}
}

func TestBadFrameIsAnsweredWithATerminate(t *testing.T) {
	for name, tt := range map[string]struct {
		s    segment
		want termCode
		recv verbs.Status
	}{
		"CRC":      {segment{op: opSend, msn: 1, after: func(b []byte) { b[len(b)-1] ^= 1 }}, termCRC, verbs.StatusFlushed},
		"opcode":   {segment{op: 0xb, msn: 1}, termOpcode, verbs.StatusFlushed},
		"too long": {segment{op: opSend, msn: 1, payload: make([]byte, 9)}, termTooLong, verbs.StatusLocalLength},
	} {
		p, s := rawToServer(t, DefaultConfig())
		buf, r := s.region(8, 0)
		s.recv(verbs.RecvWR{ID: 1, Buf: buf, LKey: r.LKey()})
		p.say(tt.s)
		all := s.ended()
		if len(all) != 2 || all[0].Status != tt.recv || all[1].Status != verbs.StatusFatal || all[1].VendorCode != uint32(tt.want) {
			t.Errorf("%s: %+v", name, all)
		}
		if c := p.hearTerminate(); c != tt.want {
			t.Errorf("%s: terminated %s, want %s", name, c, tt.want)
		}
	}
}

func TestTerminateDoesNotWaitForAPeerThatDoesNotRead(t *testing.T) {
	p, s := rawToServer(t, DefaultConfig())
	buf, r := s.region(1<<20, 0)
	p.say(segment{op: opWrite, stag: emptySTag})
	for i := range 32 {
		s.send(verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: buf, LKey: r.LKey()}}})
	}
	for range 200 {
		s.poll()
	}
	if !s.q().tx.blocked {
		t.Fatal("the socket took 32 MiB")
	}
	p.say(segment{op: 0xb, msn: 1})
	start := time.Now()
	woken := make(chan struct{})
	go func() {
		defer close(woken)
		s.sleepUntil(func() bool { return len(s.wcs) > 0 && s.wcs[len(s.wcs)-1].Op == verbs.OpDisconnected })
	}()
	<-woken
	if d := time.Since(start); d > 4*terminateLimit || len(s.wcs) == 0 {
		t.Errorf("%d completions after %s", len(s.wcs), d)
	}
}

func TestDestroyWithoutWaiting(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	s.recv(verbs.RecvWR{ID: 1})
	s.poll()
	s.qp.Destroy()
	for range 3 {
		s.poll()
	}
	if len(s.wcs) != 0 {
		t.Errorf("a destroyed queue pair reports %+v", s.wcs)
	}
	if wc := c.next(); wc.Op != verbs.OpDisconnected {
		t.Errorf("%+v", wc)
	}
	if err := s.cq.Close(); err != nil {
		t.Error(err)
	}
}

// A connection that is given up sends nothing any more: its consumer may have
// sent the same another way.
func TestNothingIsSentAfterDisconnect(t *testing.T) {
	for _, tt := range []struct {
		name string
		full bool // the socket, with the rest of a list waiting
	}{{"requests that were not started", false}, {"the rest of what the socket did not take", true}} {
		t.Run(tt.name, func(t *testing.T) {
			p, c, err := clientToRaw(t, DefaultConfig(), agree)
			if err != nil {
				t.Fatal(err)
			}
			c.poll()
			buf, mr := c.region(1<<20, 0)
			message := verbs.SendWR{Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: buf, LKey: mr.LKey()}}}
			for n := 0; tt.full && !c.q().tx.blocked; n++ {
				if n == 32 {
					t.Fatal("the socket took 32 MiB")
				}
				c.send(message)
				c.poll()
			}
			sent := c.dev.Stats().SentBytes
			c.send(message)
			c.qp.Disconnect()
			got := make(chan int64, 1)
			go func() {
				n, _ := io.Copy(io.Discard, p.conn)
				got <- n
			}()
			c.ended()
			if n := <-got; uint64(n) != sent || c.dev.Stats().SentBytes != sent {
				t.Errorf("%d bytes were sent before Disconnect, %d came", sent, n)
			}
		})
	}
}
