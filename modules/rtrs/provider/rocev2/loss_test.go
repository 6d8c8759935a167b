package rocev2

import (
	"bytes"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// badNetwork loses, doubles and delays packets on their way to d, each with
// the given percentage. A delayed packet comes after the two that follow it.
func badNetwork(d *Device, seed uint64, loss, double, delay int) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	type late struct {
		p    receivedPacket
		left int
	}
	var held []late
	d.faults.Store(&testFaults{inject: func(p receivedPacket) (out []receivedPacket) {
		switch n := rnd.IntN(100); {
		case n < loss:
		case n < loss+double:
			twin := p
			twin.b = bytes.Clone(p.b)
			out = append(out, p, twin)
		case n < loss+double+delay:
			p.b = bytes.Clone(p.b)
			held = append(held, late{p, 2})
			return nil
		default:
			out = append(out, p)
		}
		for i := range held {
			held[i].left--
		}
		for len(held) > 0 && held[0].left <= 0 {
			out = append(out, held[0].p)
			held = held[1:]
		}
		return out
	}})
}

func TestC040_TenThousandMessagesOverABadNetwork(t *testing.T) {
	tests := []struct {
		name                string
		loss, double, delay int
		cfg                 Config
		messages            int
	}{
		{"5 % are lost", 5, 0, 0, Config{}, 10000},
		{"5 % are lost, doubled and delayed each", 5, 5, 5, Config{PathMTU: 1024, NoOffload: true}, 1000},
		{"5 % are lost within segmented sends", 5, 0, 0, Config{PathMTU: 256}, 500},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, s := pairOf(t, tt.cfg)
			badNetwork(c.dev, 1, tt.loss, tt.double, tt.delay)
			badNetwork(s.dev, 2, tt.loss, tt.double, tt.delay)
			stream(t, c, s, tt.messages)
			if sent := c.dev.Stats(); sent.Resent == 0 || sent.SequenceNAKs == 0 {
				t.Errorf("nothing was lost: %+v", sent)
			}
		})
	}
}

// stream sends messages of all kinds and sizes from c to s and checks that
// each arrives once, in order, with the right bytes.
func stream(t *testing.T, c, s *end, messages int) {
	t.Helper()
	const slots, size = 32, 4096
	src, lmr := c.region(slots*size, 0)
	dst, rmr := s.region(slots*size, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
	back, bmr := c.region(size, 0)
	for i := range slots {
		s.recv(verbs.RecvWR{ID: uint64(i), Buf: dst[i*size:][:size], LKey: rmr.LKey()})
	}
	length := func(i int) int { return i * 131 % size }
	posted, done, arrived, read := 0, 0, 0, 0
	for stop := time.Now().Add(time.Minute); done < messages || arrived < messages; {
		for posted < messages && posted-arrived < slots && posted-done < slots {
			at := posted % slots * size
			n := length(posted)
			fill(src[at:at+n], posted)
			wr := verbs.SendWR{ID: uint64(posted), Signaled: true, Op: verbs.OpSendImm, Imm: uint32(posted), SGEs: []verbs.SGE{{Buf: src[at : at+n], LKey: lmr.LKey()}}}
			if posted%2 == 1 {
				wr.Op, wr.RemoteAddr, wr.RKey = verbs.OpWriteImm, rmr.Addr()+uint64(at), rmr.RKey()
			}
			c.send(wr)
			if posted++; posted%100 == 0 {
				c.send(verbs.SendWR{ID: 1 << 32, Signaled: true, Op: verbs.OpRead, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: back, LKey: bmr.LKey()}}})
			}
		}
		idle := c.poll()+s.poll() == 0
		for _, wc := range s.wcs {
			at := arrived % slots * size
			n := length(arrived)
			want := pattern(n, arrived)
			if wc.Status != verbs.StatusOK || wc.Imm != uint32(arrived) || int(wc.ByteLen) != n || !bytes.Equal(dst[at:at+n], want) {
				t.Fatalf("message %d arrived as %+v", arrived, wc)
			}
			s.recv(verbs.RecvWR{ID: wc.ID, Buf: dst[at : at+size], LKey: rmr.LKey()})
			arrived++
		}
		for _, wc := range c.wcs {
			switch {
			case wc.Status != verbs.StatusOK:
				t.Fatalf("request %d completed as %+v", done, wc)
			case wc.ID == 1<<32:
				read++
			case wc.ID != uint64(done):
				t.Fatalf("request %d completed as %+v", done, wc)
			default:
				done++
			}
		}
		c.wcs, s.wcs = c.wcs[:0], s.wcs[:0]
		if time.Now().After(stop) {
			t.Fatalf("%d posted, %d arrived, %d done; client %+v", posted, arrived, done, c.dev.Stats())
		}
		if idle {
			time.Sleep(10 * time.Microsecond)
		}
	}
	c.until("the READs", func() bool {
		for _, wc := range c.wcs {
			if wc.Status == verbs.StatusOK && wc.ID == 1<<32 {
				read++
			}
		}
		c.wcs = c.wcs[:0]
		return read == messages/100
	}, s)
}

func TestC040_LongTransfersOverABadNetwork(t *testing.T) {
	for _, op := range []verbs.Opcode{verbs.OpWrite, verbs.OpRead} {
		t.Run(map[verbs.Opcode]string{verbs.OpWrite: "write", verbs.OpRead: "read"}[op], func(t *testing.T) {
			c, s := pairOf(t, Config{PathMTU: 1024})
			badNetwork(c.dev, 3, 3, 1, 1)
			badNetwork(s.dev, 4, 3, 1, 1)
			const size = 1<<20 + 3
			local, lmr := c.region(size, 0)
			remote, rmr := s.region(size, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
			from, to := local, remote
			if op == verbs.OpRead {
				from, to = remote, local
			}
			fill(from, 5)
			c.send(verbs.SendWR{ID: 1, Op: op, Signaled: true, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(),
				SGEs: []verbs.SGE{{Buf: local[:777], LKey: lmr.LKey()}, {Buf: local[777:], LKey: lmr.LKey()}}})
			c.within(time.Minute, "the end of it", func() bool { return len(c.wcs) > 0 }, s)
			if wc := c.next(s); wc.ID != 1 || wc.Status != verbs.StatusOK || !bytes.Equal(from, to) {
				t.Errorf("%+v, first difference at %d", wc, differs(from, to))
			}
		})
	}
}

func TestC034_RNRBetweenTwoOfUs(t *testing.T) {
	c, s := pairOf(t, Config{})
	src, lmr := c.region(8192, 0)
	dst, rmr := s.region(8192, 0)
	fill(src, 3)
	c.send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true, SGEs: []verbs.SGE{{Buf: src, LKey: lmr.LKey()}}})
	c.until("three RNR NAKs", func() bool { return c.dev.Stats().RNRNAKs >= 3 }, s)
	s.recv(verbs.RecvWR{ID: 2, Buf: dst, LKey: rmr.LKey()})
	if wc := s.next(c); wc.ID != 2 || wc.ByteLen != 8192 || !bytes.Equal(src, dst) {
		t.Errorf("%+v", wc)
	}
}

func TestC038_PeerThatVanishes(t *testing.T) {
	c, s := pairOf(t, Config{RetryTimeout: 300 * time.Millisecond})
	badNetwork(s.dev, 1, 100, 0, 0)
	start := time.Now()
	c.send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true}, verbs.SendWR{ID: 2, Op: verbs.OpSend})
	if wc := c.next(s); wc.ID != 1 || wc.Status != verbs.StatusRetryExceeded {
		t.Errorf("%+v", wc)
	}
	if d := time.Since(start); d < 300*time.Millisecond || d > 4*time.Second {
		t.Errorf("it took %s", d)
	}
	if wc := c.next(s); wc.ID != 2 || wc.Status != verbs.StatusFlushed {
		t.Errorf("%+v", wc)
	}
	if wc := c.next(s); wc.Op != verbs.OpDisconnected || wc.Status != verbs.StatusRetryExceeded {
		t.Errorf("%+v", wc)
	}
	if wc := s.next(c); wc.Op != verbs.OpDisconnected { // the DREQ has come
		t.Errorf("%+v", wc)
	}
}

// The timers run from Arm as well: nobody polls but when the descriptor says
// so.
func TestC038_TimersWakeASleepingOwner(t *testing.T) {
	c, s := pairOf(t, Config{})
	c.recv(verbs.RecvWR{ID: 9})
	s.recv(verbs.RecvWR{ID: 8})
	lost := 0
	s.dev.faults.Store(&testFaults{inject: func(p receivedPacket) []receivedPacket {
		if lost++; lost == 1 {
			return nil
		}
		return []receivedPacket{p}
	}})
	c.send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
	done := make(chan verbs.WC, 1)
	go func() { done <- s.next() }()
	for len(c.wcs) == 0 {
		if c.cq.Arm() && !readable(c.cq.FD(), testLimit) {
			t.Fatal("nothing woke the owner")
		}
		c.poll()
	}
	if wc := <-done; wc.ID != 8 || c.wcs[0].ID != 1 || lost < 2 {
		t.Errorf("%+v, %+v, %d packets", wc, c.wcs, lost)
	}
}

func TestC043_ConnectionsOfManyQueuesGetTheirPackets(t *testing.T) {
	c, s := newEnd(t, Config{}, addrA), newEnd(t, Config{}, addrB)
	var clients, servers []*end
	for range 4 {
		clients, servers = append(clients, newEndOn(t, c.dev)), append(servers, newEndOn(t, s.dev))
	}
	servers[0], servers[3] = servers[3], servers[0] // slots differ at the two ends
	for i := range clients {
		join(t, clients[i], servers[i])
		servers[i].recv(verbs.RecvWR{ID: uint64(i)})
		clients[i].send(verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
		if wc := servers[i].next(clients[i]); wc.ID != uint64(i) {
			t.Errorf("queue %d: %+v", i, wc)
		}
		clients[i].next(servers[i])
	}
	for _, d := range []*Device{c.dev, s.dev} {
		n := d.Stats().Dropped
		n[dropState] = 0 // an RTU may come twice
		if n != [Reasons]uint64{} {
			t.Errorf("dropped %v", n)
		}
	}
}

func TestC040_IPv6OverABadNetwork(t *testing.T) {
	if !waitIPv6(t) {
		t.Skip("this host has no ::1")
	}
	d := openDevice(t, Config{Addrs: []netip.Addr{addr6}})
	c, s := newEndOn(t, d), newEndOn(t, d)
	join(t, c, s)
	badNetwork(d, 7, 5, 2, 2)
	stream(t, c, s, 500)
}
