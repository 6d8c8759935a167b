package iwarp

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// more connects another pair of queue pairs on the queues of c and s.
func more(t *testing.T, l verbs.Listener, c, s *end, context uint64) (client, server verbs.QP) {
	t.Helper()
	client, server = c.newQP(context), s.newQP(context)
	done := acceptOne(t, l, server)
	if _, err := c.dev.Connect(t.Context(), client, verbs.ConnectParams{Dst: l.Addr()}); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return client, server
}

// Below and above the number of connections from which epoll is asked.
func TestConnectionsShareAQueue(t *testing.T) {
	for _, conns := range []int{1, fewQPs, fewQPs + 1, 40} {
		t.Run(fmt.Sprint(conns, " connections"), func(t *testing.T) {
			c, s := newEnd(t, DefaultConfig()), newEnd(t, DefaultConfig())
			l := listen(t, s.dev)
			src, lmr := c.region(4096, 0)
			var clients, servers []verbs.QP
			for i := range conns {
				a, b := more(t, l, c, s, uint64(i))
				clients, servers = append(clients, a), append(servers, b)
			}
			dst, rmr := s.region(conns*4096, verbs.AccessRemoteWrite)
			fill(src, 77)
			for round := range 3 {
				for i := range conns {
					servers[i].PostRecv([]verbs.RecvWR{{ID: uint64(round)}})
					wr := verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(i), RemoteAddr: rmr.Addr() + uint64(i)*4096, RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: src, LKey: lmr.LKey()}}}
					if _, err := clients[i].PostSend([]verbs.SendWR{wr}); err != nil {
						t.Fatal(err)
					}
				}
				seen := map[uint64]bool{}
				for range conns {
					wc := s.next(c)
					if wc.QP != uint64(wc.Imm) || wc.ID != uint64(round) || seen[wc.QP] {
						t.Fatalf("round %d: %+v", round, wc)
					}
					seen[wc.QP] = true
					if !bytes.Equal(dst[wc.QP*4096:][:4096], src) {
						t.Fatalf("round %d: data of connection %d differ", round, wc.QP)
					}
				}
				clear(dst)
			}
			for _, q := range clients {
				q.Disconnect()
			}
			for range conns {
				if wc := s.next(c); wc.Op != verbs.OpDisconnected || wc.Status != verbs.StatusOK {
					t.Errorf("%+v", wc)
				}
			}
			for range conns {
				c.next(s)
			}
			if err := s.cq.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A connection that was quiet for long is read from when epoll says so, beside
// one that is busy as well as alone.
func TestQuietConnectionIsHeard(t *testing.T) {
	for _, busy := range []bool{false, true} {
		t.Run(fmt.Sprintf("another one is busy: %v", busy), func(t *testing.T) {
			c, s := newEnd(t, DefaultConfig()), newEnd(t, DefaultConfig())
			l := listen(t, s.dev)
			var clients, servers []verbs.QP
			for i := range 2 {
				a, b := more(t, l, c, s, uint64(i))
				clients, servers = append(clients, a), append(servers, b)
			}
			say := func(i int, imm uint32) {
				t.Helper()
				servers[i].PostRecv([]verbs.RecvWR{{ID: 1}})
				if _, err := clients[i].PostSend([]verbs.SendWR{{Op: verbs.OpWriteImm, Imm: imm}}); err != nil {
					t.Fatal(err)
				}
				c.poll() // sends
				for polls := 0; len(s.wcs) == 0; polls++ {
					if s.poll(); polls > 2*coldEvery {
						t.Fatalf("not heard in %d polls", polls)
					}
				}
				if wc := s.next(c); wc.Op != verbs.OpRecvImm || wc.QP != uint64(i) || wc.Imm != imm {
					t.Fatalf("completion %+v instead of immediate %d on %d", wc, imm, i)
				}
			}
			for round := range uint32(4) {
				say(1, round)
				for n := range 2 * coldAfter {
					s.poll()
					c.poll()
					if busy && n%32 == 0 {
						say(0, round)
					}
				}
			}
			if quiet := servers[1].(*qp).quiet; quiet < coldAfter {
				t.Errorf("the connection is tried at every poll: quiet for %d", quiet)
			}
			clients[1].Disconnect()
			if wc := s.next(c); wc.Op != verbs.OpDisconnected && wc.Status != verbs.StatusFlushed {
				t.Errorf("completion %+v after the end of a quiet connection", wc)
			}
		})
	}
}

// A queue with little room for completions gets to every connection.
func TestPollIsFairWhenTheCallerHasLittleRoom(t *testing.T) {
	c, s := newEnd(t, DefaultConfig()), newEnd(t, DefaultConfig())
	l := listen(t, s.dev)
	const conns, msgs = 6, 32
	var clients []verbs.QP
	for i := range conns {
		a, b := more(t, l, c, s, uint64(i))
		clients = append(clients, a)
		for range msgs {
			b.PostRecv([]verbs.RecvWR{{}})
		}
	}
	for _, q := range clients {
		for range msgs {
			q.PostSend([]verbs.SendWR{{Op: verbs.OpWriteImm}})
		}
	}
	for range 20 {
		c.poll()
	}
	time.Sleep(10 * time.Millisecond) // loopback: everything is there now
	counts := [conns]int{}
	var few [2]verbs.WC
	for total, stop := 0, time.Now().Add(testLimit); total < conns*msgs/2 && time.Now().Before(stop); {
		n := s.cq.Poll(few[:])
		for _, wc := range few[:n] {
			counts[wc.QP]++
		}
		total += n
	}
	for i, n := range counts {
		if n < msgs/4 {
			t.Errorf("connection %d was served %d times: %d", i, n, counts)
		}
	}
}

func TestSleepingOwnerIsWoken(t *testing.T) {
	for _, conns := range []int{1, fewQPs + 2} {
		c, s := newEnd(t, DefaultConfig()), newEnd(t, DefaultConfig())
		l := listen(t, s.dev)
		var client, server verbs.QP
		for i := range conns {
			client, server = more(t, l, c, s, uint64(i))
		}
		const rounds = 200
		for i := range 32 {
			server.PostRecv([]verbs.RecvWR{{ID: uint64(i)}})
			client.PostRecv([]verbs.RecvWR{{ID: uint64(i)}})
		}
		var wg sync.WaitGroup
		answer := func(e *end, q verbs.QP, start bool) {
			seen := 0
			if start {
				q.PostSend([]verbs.SendWR{{Op: verbs.OpWriteImm}})
			}
			e.sleepUntil(func() bool {
				for _, wc := range e.wcs {
					if wc.Op == verbs.OpRecvImm {
						seen++
						q.PostRecv([]verbs.RecvWR{{}})
						if seen < rounds || !start {
							q.PostSend([]verbs.SendWR{{Op: verbs.OpWriteImm}})
						}
					}
				}
				e.wcs = e.wcs[:0]
				e.cq.Flush()
				return seen >= rounds
			})
			if seen < rounds {
				t.Errorf("%d of %d messages came", seen, rounds)
			}
		}
		wg.Go(func() { answer(s, server, false) })
		wg.Go(func() { answer(c, client, true) })
		wg.Wait()
	}
}

func TestDisconnectWakesASleepingOwner(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	s.poll()
	var wg sync.WaitGroup
	gone := func(e *end) func() bool {
		return func() bool { return len(e.wcs) > 0 && e.wcs[len(e.wcs)-1].Op == verbs.OpDisconnected }
	}
	wg.Go(func() { s.sleepUntil(gone(s)) })
	wg.Go(func() { c.sleepUntil(gone(c)) })
	time.Sleep(10 * time.Millisecond)
	for range 4 {
		wg.Go(c.qp.Disconnect)
	}
	wg.Wait()
	if !gone(c)() || !gone(s)() {
		t.Errorf("%+v %+v", c.wcs, s.wcs)
	}
}

// More than the sockets take: the rest stays in the list and leaves piece by
// piece, whoever sleeps in between.
func TestBackpressure(t *testing.T) {
	for _, cfg := range []Config{DefaultConfig(), {MULPDU: 5000}} {
		c, s := pairOf(t, cfg)
		const msgs, size = 48, 1 << 20
		src, lmr := c.region(size, 0)
		dst, rmr := s.region(msgs*size, verbs.AccessRemoteWrite)
		rng := rand.NewChaCha8([32]byte{1})
		rng.Read(src)
		for i := range msgs {
			s.recv(verbs.RecvWR{ID: uint64(i)})
			c.send(verbs.SendWR{ID: uint64(i), Op: verbs.OpWriteImm, Signaled: i%7 == 5, Imm: uint32(i), RemoteAddr: rmr.Addr() + uint64(i*size), RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: src[:size/3], LKey: lmr.LKey()}, {Buf: src[size/3:], LKey: lmr.LKey()}}})
		}
		for range 50 {
			c.poll()
		}
		if !c.q().tx.blocked {
			t.Fatal("the socket took 48 MiB")
		}
		var wg sync.WaitGroup
		wg.Go(func() { c.sleepUntil(func() bool { return len(c.wcs) == msgs/7+1 }) })
		wg.Go(func() { s.sleepUntil(func() bool { return len(s.wcs) == msgs }) })
		wg.Wait()
		if len(s.wcs) != msgs || len(c.wcs) != msgs/7+1 {
			t.Fatalf("%d of %d messages, %d send completions", len(s.wcs), msgs, len(c.wcs))
		}
		for i, wc := range s.wcs {
			if wc.Imm != uint32(i) || wc.ByteLen != size || !bytes.Equal(dst[i*size:][:size], src) {
				t.Fatalf("message %d: %+v", i, wc)
			}
		}
		st := s.dev.Stats()
		if st.PlacedCopyBytes+st.DirectBytes != msgs*size || st.ReceivedBytes < msgs*size {
			t.Errorf("%+v do not add up to %d", st, msgs*size)
		}
		if cfg.MULPDU == defaultMULPDU && st.PlacedCopyBytes > msgs*size/100 {
			t.Errorf("of large payloads %d bytes were copied, %d came directly", st.PlacedCopyBytes, st.DirectBytes)
		}
	}
}

func TestSendQueueRoomComesBackWithoutCompletions(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	for i := range 1000 {
		s.recv(verbs.RecvWR{})
		c.send(verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(i)})
		c.cq.Flush()
		if wc := s.next(); wc.Imm != uint32(i) {
			t.Fatalf("%+v", wc)
		}
	}
}

func TestKeysRotateInTheOrderOfThePosts(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	src, lmr := c.region(8, 0)
	dst, rmr := s.region(8, verbs.AccessRemoteWrite)
	kbuf, kmr := c.region(8, 0)
	_ = kbuf
	key := rmr.RKey()
	c.poll()
	for i := range 300 { // more than an 8-bit key has values
		fill(src, byte(i))
		s.recv(verbs.RecvWR{ID: 1})
		c.recv(verbs.RecvWR{ID: 2, Buf: kbuf, LKey: kmr.LKey()})
		c.send(verbs.SendWR{Op: verbs.OpWriteImm, RemoteAddr: rmr.Addr(), RKey: key, SGEs: []verbs.SGE{{Buf: src, LKey: lmr.LKey()}}})
		if wc := s.next(c); wc.Status != verbs.StatusOK || !bytes.Equal(src, dst) {
			t.Fatalf("round %d: %+v", i, wc)
		}
		next := verbs.NextKey(key)
		s.send(verbs.SendWR{Op: verbs.OpLocalInv, RKey: key}, verbs.SendWR{Op: verbs.OpRegMR, RKey: next}, verbs.SendWR{Op: verbs.OpSendImm, Imm: next})
		if wc := c.next(s); wc.Imm != next {
			t.Fatalf("round %d: %+v", i, wc)
		}
		key = next
	}
	c.send(verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: rmr.Addr(), RKey: key - 1, SGEs: []verbs.SGE{{Buf: src, LKey: lmr.LKey()}}})
	if wc := s.next(c); wc.Op != verbs.OpDisconnected || wc.VendorCode != uint32(termSTag) {
		t.Errorf("stale key: %+v", wc)
	}
}

// An invalidation alone needs no place in the send queue, and is done when PostSend
// returns. Behind requests that are not sent it keeps its turn.
func TestInvalidationIsDoneAtOnce(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	buf, mr := s.region(8, verbs.AccessRemoteWrite)
	q := s.qp.(*qp)
	reachable := func(key uint32) bool { return q.Domain.Remote(key, mr.Addr(), 8, verbs.AccessRemoteWrite) != nil }
	s.send(verbs.SendWR{Op: verbs.OpLocalInv, RKey: mr.RKey()})
	if reachable(mr.RKey()) || q.SQ.Head != q.SQ.Tail {
		t.Errorf("reachable: %v, %d requests wait", reachable(mr.RKey()), q.SQ.Tail-q.SQ.Head)
	}
	next := verbs.NextKey(mr.RKey())
	s.send(verbs.SendWR{Op: verbs.OpRegMR, RKey: next})
	s.send(verbs.SendWR{Op: verbs.OpLocalInv, RKey: next}) // behind the registration
	for range 10 {
		s.poll()
		c.poll()
	}
	if reachable(next) {
		t.Error("an invalidation overtook the registration before it")
	}
	s.send(verbs.SendWR{ID: 5, Op: verbs.OpLocalInv, RKey: next, Signaled: true})
	if wc := s.next(c); wc.ID != 5 || wc.Status != verbs.StatusOK {
		t.Errorf("a signalled invalidation: %+v", wc)
	}
	_ = buf
}

// Small elements are copied between the headers: they cost no entry of the list.
// Payload of a disk is not.
func TestSmallElementsShareAnEntry(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	src, smr := c.region(4096+inlineMax, 0)
	dst, dmr := s.region(4096+inlineMax, verbs.AccessRemoteWrite)
	fill(src, 5)
	q := c.qp.(*qp)
	piece := func(from, n int) verbs.SGE { return verbs.SGE{Buf: src[from:][:n], LKey: smr.LKey()} }
	for _, test := range []struct {
		sges    []verbs.SGE
		entries int
	}{
		{[]verbs.SGE{piece(0, inlineMax)}, 1},
		{[]verbs.SGE{piece(0, inlineMax+1)}, 3},
		{[]verbs.SGE{piece(0, 4096), piece(4096, inlineMax)}, 3},
		{[]verbs.SGE{piece(0, 5), piece(5, 4096)}, 3},
	} {
		clear(dst)
		s.recv(verbs.RecvWR{ID: 1})
		c.send(verbs.SendWR{Op: verbs.OpWriteImm, SGEs: test.sges, RemoteAddr: dmr.Addr(), RKey: dmr.RKey()})
		q.tx.clearList()
		q.buildList()
		if q.tx.n != test.entries {
			t.Errorf("%d bytes first: %d entries, want %d", len(test.sges[0].Buf), q.tx.n, test.entries)
		}
		n := 0
		for _, e := range test.sges {
			n += len(e.Buf)
		}
		if wc := s.next(c); wc.Status != verbs.StatusOK || wc.ByteLen != uint32(n) || !bytes.Equal(dst[:n], src[:n]) {
			t.Fatalf("%d bytes: %+v", n, wc)
		}
	}
}

// Many small messages do not overrun the room for headers.
func TestManySmallElements(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	src, smr := c.region(4*inlineMax, 0)
	fill(src, 6)
	in, imr := s.region(60*4*inlineMax, 0)
	for round := range 3 {
		var wrs []verbs.SendWR
		for i := range 60 {
			s.recv(verbs.RecvWR{ID: uint64(i), Buf: in[i*4*inlineMax:][:4*inlineMax], LKey: imr.LKey()})
			wr := verbs.SendWR{Op: verbs.OpSend, Signaled: i == 59}
			for k := range 4 {
				wr.SGEs = append(wr.SGEs, verbs.SGE{Buf: src[k*inlineMax:][:inlineMax], LKey: smr.LKey()})
			}
			wrs = append(wrs, wr)
		}
		clear(in)
		c.send(wrs...)
		for i := range 60 {
			if wc := s.next(c); wc.ID != uint64(i) || !bytes.Equal(in[i*4*inlineMax:][:4*inlineMax], src) {
				t.Fatalf("round %d, message %d: %+v", round, i, wc)
			}
		}
		if wc := c.next(s); wc.Status != verbs.StatusOK {
			t.Fatalf("round %d: %+v", round, wc)
		}
	}
}

func TestKeyThatCannotChangeEndsTheConnection(t *testing.T) {
	for name, wr := range map[string]verbs.SendWR{
		"valid region is registered again": {Op: verbs.OpRegMR},
		"stale key is invalidated":         {Op: verbs.OpLocalInv, RKey: 1},
	} {
		c, s := pairOf(t, DefaultConfig())
		_, mr := c.region(8, 0)
		wr.ID, wr.RKey = 7, wr.RKey^mr.RKey()
		c.send(wr)
		if wc := c.next(s); wc.ID != 7 || wc.Status != verbs.StatusLocalProt {
			t.Errorf("%s: %+v", name, wc)
		}
		if wc := s.next(c); wc.Op != verbs.OpDisconnected {
			t.Errorf("%s: peer sees %+v", name, wc)
		}
	}
}

// Whatever owner, the data path allocates nothing.
func TestDataPathDoesNotAllocate(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	src, lmr := c.region(64<<10, 0)
	dst, rmr := s.region(64<<10, verbs.AccessRemoteWrite)
	wcs := make([]verbs.WC, 16)
	until := func(q verbs.CQ, other verbs.CQ) {
		for q.Poll(wcs) == 0 {
			other.Poll(nil)
			other.Flush()
		}
	}
	sge := []verbs.SGE{{Buf: src[:4096], LKey: lmr.LKey()}}
	back := []verbs.SGE{{Buf: dst[:8], LKey: rmr.LKey()}}
	recvS := []verbs.RecvWR{{Buf: dst[8192:], LKey: rmr.LKey()}}
	recvC := []verbs.RecvWR{{Buf: src[8192:], LKey: lmr.LKey()}}
	for name, wr := range map[string]verbs.SendWR{
		"WRITE_IMM":       {Op: verbs.OpWriteImm, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: sge},
		"SEND":            {Op: verbs.OpSend, SGEs: sge},
		"large WRITE_IMM": {Op: verbs.OpWriteImm, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: src, LKey: lmr.LKey()}}},
	} {
		there := []verbs.SendWR{wr}
		answer := []verbs.SendWR{{Op: verbs.OpSend, SGEs: back}}
		round := func() {
			s.qp.PostRecv(recvS)
			c.qp.PostRecv(recvC)
			c.qp.PostSend(there)
			until(s.cq, c.cq)
			s.qp.PostSend(answer)
			until(c.cq, s.cq)
			c.cq.Arm()
		}
		round()
		if n := testing.AllocsPerRun(200, round); n != 0 {
			t.Errorf("%s: %v allocations per round trip", name, n)
		}
	}
}

func TestConnectBindsTheSource(t *testing.T) {
	s := newEnd(t, DefaultConfig())
	c := newEnd(t, DefaultConfig())
	l := listen(t, s.dev)
	done := acceptOne(t, l, s.qp)
	_, err := c.dev.Connect(t.Context(), c.qp, verbs.ConnectParams{Src: mustAddr("127.0.0.9"), Dst: l.Addr()})
	if err != nil || <-done != nil {
		t.Fatal(err)
	}
	if c.qp.LocalAddr().Addr() != mustAddr("127.0.0.9") || s.qp.RemoteAddr() != c.qp.LocalAddr() {
		t.Errorf("local %s, seen as %s", c.qp.LocalAddr(), s.qp.RemoteAddr())
	}
}

func TestSocketOptions(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	for _, e := range []*end{c, s} {
		e.poll()
		for name, tt := range map[string]struct{ level, opt, want int }{
			"TCP_NODELAY":      {unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
			"SO_KEEPALIVE":     {unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
			"TCP_USER_TIMEOUT": {unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 7000},
			"TCP_KEEPIDLE":     {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 3},
			"TCP_KEEPINTVL":    {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 2},
			"SO_PROTOCOL":      {unix.SOL_SOCKET, unix.SO_PROTOCOL, unix.IPPROTO_TCP},
		} {
			if got, err := unix.GetsockoptInt(e.q().fd, tt.level, tt.opt); got != tt.want || err != nil {
				t.Errorf("%s is %d, %v", name, got, err)
			}
		}
		n, err := unix.GetsockoptInt(e.q().fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
		info, ierr := unix.GetsockoptTCPInfo(e.q().fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		if err != nil || ierr != nil {
			t.Fatal(err, ierr)
		}
		most := sendBufferFor(time.Duration(info.Min_rtt) * time.Microsecond) // the least may have become less
		if n < sendWaiting*3/4 || most < sendMost && n > max(most, sendMost/2) {
			t.Errorf("send buffer of %d bytes to a peer %d us away", n, info.Min_rtt)
		}
		if fl, _ := unix.FcntlInt(uintptr(e.q().fd), unix.F_GETFL, 0); fl&unix.O_NONBLOCK == 0 {
			t.Error("socket blocks")
		}
	}
}

func TestSendBufferFor(t *testing.T) {
	for rtt, want := range map[time.Duration]int{
		0: 384 << 10, 25 * time.Microsecond: 484 << 10, 100 * time.Microsecond: 784 << 10,
		2 * time.Millisecond: 8384 << 10, time.Hour: 4000384 << 10,
	} {
		if got := sendBufferFor(rtt); got != want {
			t.Errorf("%v: %d KiB, want %d", rtt, got>>10, want>>10)
		}
	}
}

// A limit that cannot be had would cost more than none.
func TestSendBufferThatTheKernelCuts(t *testing.T) {
	for _, c := range []struct {
		most int
		rtt  time.Duration
		want bool
	}{
		{2 * 212992, 0, true}, {2 * 212992, 25 * time.Microsecond, true}, {2 * 212992, 100 * time.Microsecond, false},
		{2 * 212992, 500 * time.Microsecond, false}, {8 << 20, 500 * time.Microsecond, true},
	} {
		if got := fitsBelow(c.most, sendBufferFor(c.rtt)); got != c.want {
			t.Errorf("%d bytes at most, %v: %t", c.most, c.rtt, got)
		}
	}
}

func TestIPv6(t *testing.T) {
	if l, err := net.Listen("tcp", "[::1]:0"); err != nil {
		t.Skip("no IPv6 here: ", err)
	} else {
		l.Close()
	}
	c, s := newEnd(t, DefaultConfig()), newEnd(t, DefaultConfig())
	join(t, c, s, "[::1]:0")
	s.recv(verbs.RecvWR{ID: 3})
	c.send(verbs.SendWR{Op: verbs.OpWriteImm, Imm: 9})
	if wc := s.next(c); wc.Imm != 9 {
		t.Errorf("%+v", wc)
	}
}

// A wildcard IPv6 listener takes IPv4 clients and shows their plain address.
func TestWildcardListenerTakesBothFamilies(t *testing.T) {
	c, s := newEnd(t, DefaultConfig()), newEnd(t, DefaultConfig())
	l, err := s.dev.Listen(mustAddrPort("[::]:0"))
	if err != nil {
		t.Skip("no IPv6 here: ", err)
	}
	defer l.Close()
	done := acceptOne(t, l, s.qp)
	dst := mustAddrPort(fmt.Sprintf("127.0.0.1:%d", l.Addr().Port()))
	if _, err := c.dev.Connect(context.Background(), c.qp, verbs.ConnectParams{Dst: dst}); err != nil || <-done != nil {
		t.Fatal(err)
	}
	if s.qp.LocalAddr() != dst || !s.qp.RemoteAddr().Addr().Is4() {
		t.Errorf("local %s, remote %s", s.qp.LocalAddr(), s.qp.RemoteAddr())
	}
}
