package rocev2

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// udPair is two UD queue pairs of devices of their own. Payloads that qb
// receives name their sender and number.
func udPair(t testing.TB) (qa, qb *udQP) {
	t.Helper()
	a, b := openDevice(t, Config{}), openDevice(t, Config{})
	qa = must(a.OpenDatagrams(verbs.DatagramConfig{Local: addrA, QKey: 9}))(t).(*udQP)
	qb = must(b.OpenDatagrams(verbs.DatagramConfig{Local: addrB, QKey: 9}))(t).(*udQP)
	t.Cleanup(func() { qa.Close(); qb.Close() })
	return qa, qb
}

// datagramTo makes a datagram of n bytes to q, filled by its number.
func datagramTo(q *udQP, number, n int) verbs.Datagram {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(number + i*7)
	}
	return verbs.Datagram{Payload: b, Peer: q.LocalAddr(), QPN: q.QPN(), QKey: 9}
}

// wantMessages receives the datagrams from q and compares them.
func wantMessages(t *testing.T, q *udQP, want []verbs.Datagram) {
	t.Helper()
	msgs := make([]verbs.Datagram, 7)
	for len(want) > 0 {
		for i := range msgs {
			msgs[i].Payload = make([]byte, 4096)
		}
		n, err := q.Receive(msgs)
		if err != nil || n > len(want) {
			t.Fatalf("Receive: %d, %v; %d are left", n, err, len(want))
		}
		for i, m := range msgs[:n] {
			if !slices.Equal(m.Payload, want[i].Payload) {
				t.Fatalf("%d before the last: received %d bytes, want %d, or other ones", len(want)-i, len(m.Payload), len(want[i].Payload))
			}
		}
		want = want[n:]
	}
}

// TestC054_Runs: packets of one size to one queue pair are one segmented send,
// which a shorter packet ends.
func TestC054_Runs(t *testing.T) {
	qa, qb := udPair(t)
	other := must(qb.dev.OpenDatagrams(verbs.DatagramConfig{Local: addrB, QKey: 9}))(t).(*udQP)
	defer other.Close()
	qa.send.gso = true
	many := slices.Repeat([]int{2000}, 40)
	for _, tc := range []struct {
		name  string
		sizes []int // negative: to the other queue pair
		want  []int // packets of each send
	}{
		{"one size", []int{500, 500, 500}, []int{3}},
		{"the same size with pad", []int{500, 499, 497}, []int{3}},
		{"a shorter last one", []int{500, 500, 20, 500, 500}, []int{3, 2}},
		{"a longer one", []int{20, 500}, []int{1, 1}},
		{"empty ones", []int{0, 0, 0}, []int{3}},
		{"a mix of destinations", []int{500, -500, 500, 500, -500, -20}, []int{1, 1, 2, 2}},
		{"as many bytes as a send takes", many, []int{32, 8}},
		{"as many packets as a send takes", slices.Repeat([]int{4}, 100), []int{64, 36}},
	} {
		msgs := make([]verbs.Datagram, len(tc.sizes))
		var want, wantOther []verbs.Datagram
		for i, n := range tc.sizes {
			to := qb
			if n < 0 {
				to, n = other, -n
			}
			msgs[i] = datagramTo(to, i, n)
			if to == qb {
				want = append(want, msgs[i])
			} else {
				wantOther = append(wantOther, msgs[i])
			}
		}
		qa.send.mu.Lock()
		if n, err := qa.listBatch(msgs); n != len(msgs) || err != nil {
			t.Fatalf("%s: %d listed, %v", tc.name, n, err)
		}
		var got []int
		for _, r := range qa.send.runs[:qa.send.n] {
			got = append(got, r.packets)
		}
		qa.send.mu.Unlock()
		if !slices.Equal(got, tc.want) {
			t.Errorf("%s: sends of %v packets, want %v", tc.name, got, tc.want)
		}
		if n, err := qa.Send(msgs); n != len(msgs) || err != nil {
			t.Fatalf("%s: Send: %d, %v", tc.name, n, err)
		}
		wantMessages(t, qb, want)
		wantMessages(t, other, wantOther)
	}
}

// TestC054_Refused: datagrams of a segmented send that the kernel refuses leave
// one by one, and so do later ones.
func TestC054_Refused(t *testing.T) {
	for _, errno := range []unix.Errno{unix.EIO, unix.EOPNOTSUPP, unix.EINVAL} {
		t.Run(errno.Error(), func(t *testing.T) {
			qa, qb := udPair(t)
			s := &qa.send
			s.gso = true
			refused := 0
			s.call = func(fd uintptr) {
				for i := s.at; i < s.n; i++ {
					if s.msgs[i].hdr.Control == nil {
						continue
					}
					if s.taken, s.errno = 0, errno; i > s.at {
						s.taken, s.errno = sendMany(int(fd), s.msgs[s.at:i])
					} else {
						refused++
					}
					return
				}
				s.sendOnce(fd)
			}
			var msgs []verbs.Datagram
			for i, n := range []int{20, 500, 500, 500, 30, 500, 500} {
				msgs = append(msgs, datagramTo(qb, i, n))
			}
			for range 2 {
				if n, err := qa.Send(msgs); n != len(msgs) || err != nil {
					t.Fatalf("%v: Send: %d, %v", errno, n, err)
				}
				wantMessages(t, qb, msgs)
			}
			if refused != 1 || s.gso {
				t.Errorf("%v: %d segmented sends were tried, want 1", errno, refused)
			}
		})
	}
}

// TestC054_Unreachable: a datagram that the kernel refuses for another reason is
// lost, and those behind it are sent.
func TestC054_Unreachable(t *testing.T) {
	qa, qb := udPair(t)
	s, first := &qa.send, true
	s.call = func(fd uintptr) {
		if first {
			first, s.taken, s.errno = false, 0, unix.ENETUNREACH
			return
		}
		s.sendOnce(fd)
	}
	msgs := []verbs.Datagram{datagramTo(qb, 0, 500), datagramTo(qb, 1, 500), datagramTo(qb, 2, 600), datagramTo(qb, 3, 600)}
	if !s.gso {
		msgs = msgs[1:]
	}
	if n, err := qa.Send(msgs); n != len(msgs) || err != nil {
		t.Fatalf("Send: %d, %v", n, err)
	}
	wantMessages(t, qb, msgs[len(msgs)-2:])
}

// TestC054_Merged: datagrams that come merged are taken apart. Those that are
// cut or changed are dropped and counted.
func TestC054_Merged(t *testing.T) {
	d := openDevice(t, Config{})
	q := must(d.OpenDatagrams(verbs.DatagramConfig{Local: addrB, QKey: 9}))(t).(*udQP)
	defer q.Close()
	c := must(net.DialUDP("udp", &net.UDPAddr{IP: addrA.AsSlice()}, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addrB, roceUDPPort))))(t)
	defer c.Close()
	ps := newPseudo(addrA, addrB, uint16(c.LocalAddr().(*net.UDPAddr).Port))
	const size = udHead + 40 + icrcLen
	var all []byte
	var want []verbs.Datagram
	for i := range 8 {
		b := make([]byte, size)
		m := datagramTo(q, i, 40)
		putBTH(b, opDatagram, 0, q.QPN(), 0, false)
		be.PutUint32(b[bthLen:], 9)
		be.PutUint32(b[bthLen+4:], 5)
		copy(b[udHead:], m.Payload)
		ps.sealPacket(b, uint16(i))
		switch i {
		case 0, 3:
			b[udHead]++ // another payload than the ICRC covers
		case 7:
			b = b[:10] // cut
		default:
			want = append(want, m)
		}
		all = append(all, b...)
	}
	raw := must(c.SyscallConn())(t)
	var err error
	raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_UDP, unix.UDP_SEGMENT, size) })
	if err != nil {
		t.Skip("the kernel does not segment UDP:", err)
	}
	if _, err := c.Write(all); err != nil {
		t.Fatal(err)
	}
	wantMessages(t, q, want)
	last := verbs.Datagram{Payload: []byte("the last"), Peer: addrB, QPN: q.QPN(), QKey: 9}
	if _, err := q.Send([]verbs.Datagram{last}); err != nil {
		t.Fatal(err)
	}
	wantMessages(t, q, []verbs.Datagram{last})
	if dropped := d.Stats().Dropped; dropped[dropICRC] != 2 || dropped[dropLength] != 1 {
		t.Errorf("dropped %v, want 2 for their ICRC and 1 for its length", dropped)
	}
}

// TestC054_MergedWaitAsOne: merged datagrams that wait take one place of the
// receive queue.
func TestC054_MergedWaitAsOne(t *testing.T) {
	qa, _ := udPair(t)
	if !qa.send.gso || !qa.agent.port.gro.Load() {
		t.Skip("the kernel does not segment or merge UDP")
	}
	b := openDevice(t, Config{Addrs: []netip.Addr{testAddr(3)}})
	q := must(b.OpenDatagrams(verbs.DatagramConfig{Local: testAddr(3), QKey: 9, RecvQueue: 2}))(t).(*udQP)
	defer q.Close()
	var msgs []verbs.Datagram
	for i := range 30 {
		msgs = append(msgs, datagramTo(q, i, 500))
	}
	want := slices.Concat(msgs, msgs)
	for range 3 {
		if n, err := qa.Send(msgs); n != len(msgs) || err != nil {
			t.Fatalf("Send: %d, %v", n, err)
		}
	}
	for end := time.Now().Add(20 * time.Second); q.Dropped().Full < 30; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("dropped %+v, want 30 for want of room", q.Dropped())
		}
	}
	wantMessages(t, q, want)
}

func TestC054_AllocFreeDatagrams(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	qa, qb := udPair(t)
	var out, in []verbs.Datagram
	for i := range 64 {
		out = append(out, datagramTo(qb, i, 1000))
		in = append(in, verbs.Datagram{Payload: make([]byte, 4096)})
	}
	round := func() {
		if n, err := qa.Send(out); n != len(out) || err != nil {
			panic(fmt.Sprint(n, err))
		}
		for got := 0; got < len(out); {
			n, err := qb.Receive(in)
			if err != nil {
				panic(err)
			}
			got += n
		}
	}
	for i := range qb.ring { // entries grow when they are used
		qb.ring[i].buf, qb.ring[i].ends = make([]byte, 0, maxSegmented), make([]int, 0, maxSegments)
	}
	for range 20 {
		round()
	}
	if n := testing.AllocsPerRun(200, round); n != 0 {
		t.Errorf("%v allocations for 64 datagrams", n)
	}
}
