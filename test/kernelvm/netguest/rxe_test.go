package netguest

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/dev"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The cable of rxe9, which is in the guest's own namespace, and ours.
var (
	rxe4, ours4 = netip.MustParseAddr("10.7.0.1"), netip.MustParseAddr("10.7.0.2")
	rxe6, ours6 = netip.MustParseAddr("fd00:7::1"), netip.MustParseAddr("fd00:7::2")
)

const (
	qkey      = 0xb1b
	otherQKey = 0xb1c
	otherPKey = 0x8001
)

// newCable makes rxe9 and the namespace of our end.
func newCable(t *testing.T) *host {
	t.Helper()
	inGuest(t)
	h := newHost(t, "ud")
	command(t, "ip", "link", "add", "u0", "mtu", "4200", "type", "veth", "peer", "name", "u1", "mtu", "4200", "netns", h.name)
	t.Cleanup(func() {
		exec.Command("rdma", "link", "delete", "rxe9").Run()
		exec.Command("ip", "link", "del", "u0").Run()
	})
	for _, a := range []netip.Addr{rxe4, rxe6} {
		command(t, "ip", "addr", "add", fmt.Sprintf("%s/%d", a, a.BitLen()*3/4), "dev", "u0", "nodad")
	}
	for _, a := range []netip.Addr{ours4, ours6} {
		h.run(fmt.Sprintf("ip addr add %s/%d dev u1 nodad", a, a.BitLen()*3/4))
	}
	h.run("ip link set u1 up")
	command(t, "ip", "link", "set", "u0", "up")
	command(t, "rdma", "link", "add", "rxe9", "type", "rxe", "netdev", "u0")
	// Address handles need the neighbour; rdma's own search for it may sleep for long.
	for _, a := range []netip.Addr{ours4, ours6} {
		command(t, "bash", "-c", `for i in {1..400}; do echo > /dev/udp/$0/9; ip neigh show to $0 | grep -q lladdr && exit; sleep 0.05; done; exit 1`, a.String())
	}
	return h
}

// gidIndex is the place of a GID in the table of rxe9.
func gidIndex(t *testing.T, a netip.Addr) int {
	t.Helper()
	want, found := netip.AddrFrom16(a.As16()), -1
	eventually(t, "rxe9 has the GID "+a.String(), func() bool {
		for i := range 16 {
			b, err := os.ReadFile(fmt.Sprintf("/sys/class/infiniband/rxe9/ports/1/gids/%d", i))
			if err != nil {
				continue
			}
			if g, err := netip.ParseAddr(strings.TrimSpace(string(b))); err == nil && netip.AddrFrom16(g.As16()) == want {
				found = i
				return true
			}
		}
		return false
	})
	return found
}

// linuxQP is a UD queue pair of rxe9.
type linuxQP struct {
	t     *testing.T
	stdin io.Writer
	lines chan string
	qpn   uint32
	gid   netip.Addr
	mtu   int
}

func newLinuxQP(t *testing.T, at netip.Addr, qkey uint32) *linuxQP {
	t.Helper()
	cmd := exec.Command(*peerPath, "rxe9", fmt.Sprint(gidIndex(t, at)), fmt.Sprint(qkey))
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var failed bytes.Buffer
	cmd.Stderr = &failed
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	q := &linuxQP{t: t, stdin: stdin, lines: make(chan string, 10)}
	go func() {
		defer close(q.lines)
		s := bufio.NewScanner(stdout)
		s.Buffer(nil, 64<<10)
		for s.Scan() {
			q.lines <- s.Text()
		}
	}()
	t.Cleanup(func() {
		stdin.Close()
		cmd.Process.Kill()
		cmd.Wait()
		if failed.Len() > 0 {
			t.Errorf("udpeer: %s", &failed)
		}
	})
	var gid string
	if _, err := fmt.Sscanf(q.next(), "qpn %d gid %s mtu %d", &q.qpn, &gid, &q.mtu); err != nil {
		t.Fatal(err)
	}
	b, err := hex.DecodeString(gid)
	if err != nil || len(b) != 16 {
		t.Fatalf("GID %q: %v", gid, err)
	}
	q.gid = netip.AddrFrom16([16]byte(b))
	return q
}

func (q *linuxQP) next() string {
	q.t.Helper()
	select {
	case l, ok := <-q.lines:
		if !ok {
			q.t.Fatal("udpeer has ended")
		}
		return l
	case <-time.After(patience):
		q.t.Fatal("udpeer says nothing")
	}
	return ""
}

func (q *linuxQP) ask(format string, args ...any) string {
	q.t.Helper()
	if _, err := fmt.Fprintf(q.stdin, format+"\n", args...); err != nil {
		q.t.Fatal(err)
	}
	return q.next()
}

// send sends a datagram to a queue pair of ours.
func (q *linuxQP) send(to netip.Addr, qpn, qkey uint32, payload []byte) {
	q.t.Helper()
	gid, text := to.As16(), "-"
	if len(payload) > 0 {
		text = hex.EncodeToString(payload)
	}
	if got := q.ask("send %x %d %d %s", gid, qpn, qkey, text); got != "sent success" {
		q.t.Fatalf("%s; want success", got)
	}
}

// datagram is what Linux has received.
type datagram struct {
	qpn     uint32
	grh     []byte // 40 octets
	payload []byte
}

// recv waits for a datagram. ok is false if none comes.
func (q *linuxQP) recv(limit time.Duration) (d datagram, ok bool) {
	q.t.Helper()
	line := q.ask("recv %d", limit.Milliseconds())
	if line == "none" {
		return d, false
	}
	var flags, grh, payload string
	if _, err := fmt.Sscanf(line, "got %d %s %s %s", &d.qpn, &flags, &grh, &payload); err != nil || flags != "grh" {
		q.t.Fatalf("%q: %v; want a datagram with a GRH", line, err)
	}
	d.grh, _ = hex.DecodeString(grh)
	if payload != "-" {
		d.payload, _ = hex.DecodeString(payload)
	}
	return d, true
}

// counters are the datagrams with wrong keys that Linux has dropped.
func (q *linuxQP) counters() (pkeys, qkeys int) {
	q.t.Helper()
	if _, err := fmt.Sscanf(q.ask("counters"), "counters %d %d", &pkeys, &qkeys); err != nil {
		q.t.Fatal(err)
	}
	return pkeys, qkeys
}

// device is our fabric on the other end of the cable.
func (h *host) device(t *testing.T, addrs ...netip.Addr) verbs.DatagramDevice {
	t.Helper()
	var d verbs.Device
	h.in(func() (err error) {
		d, err = rocev2.Open(rocev2.Config{Addrs: addrs, Logger: slog.New(slog.DiscardHandler)})
		return err
	})
	t.Cleanup(func() { d.Close() })
	return d.(verbs.DatagramDevice)
}

// ourQP makes a UD queue pair of ours.
func (h *host) ourQP(t *testing.T, d verbs.DatagramDevice, cfg verbs.DatagramConfig) (q verbs.DatagramQP) {
	t.Helper()
	h.in(func() (err error) {
		q, err = d.OpenDatagrams(cfg)
		return err
	})
	t.Cleanup(func() { q.Close() })
	return q
}

// received waits for a datagram of ours.
func received(t *testing.T, q verbs.DatagramQP) verbs.Datagram {
	t.Helper()
	msgs, done := []verbs.Datagram{{Payload: make([]byte, 4096)}}, make(chan error, 1)
	go func() {
		_, err := q.Receive(msgs)
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(patience):
		t.Fatalf("no datagram of Linux came; dropped: %+v", q.Dropped())
	}
	return msgs[0]
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}

// TestC055_Datagrams exchanges datagrams with a UD queue pair of Linux: each
// side checks the other's ICRC, P_Key and Q_Key.
func TestC055_Datagrams(t *testing.T) {
	h := newCable(t)
	d := h.device(t, ours4, ours6)
	for _, f := range []struct{ linux, ours netip.Addr }{{rxe4, ours4}, {rxe6, ours6}} {
		family := map[bool]string{true: "IPv4", false: "IPv6"}[f.ours.Is4()]
		q := h.ourQP(t, d, verbs.DatagramConfig{Local: f.ours, QKey: qkey})
		l := newLinuxQP(t, f.linux, qkey)
		send := func(q verbs.DatagramQP, key uint32, payload []byte) {
			t.Helper()
			if _, err := q.Send([]verbs.Datagram{{Payload: payload, Peer: f.linux, QPN: l.qpn, QKey: key}}); err != nil {
				t.Fatal(err)
			}
		}
		for _, n := range []int{1, 2, 3, 4, 60, 2048, min(q.MaxPayload(), l.mtu)} {
			want := pattern(n)
			l.send(f.ours, q.QPN(), qkey, want)
			if got := received(t, q); !bytes.Equal(got.Payload, want) || got.Peer != f.linux || got.QPN != l.qpn || got.Multicast {
				t.Errorf("%s, %d bytes of Linux: %d came from %s, queue pair %d", family, n, len(got.Payload), got.Peer, got.QPN)
			}
			send(q, qkey, want)
			got, ok := l.recv(patience)
			if !ok || !bytes.Equal(got.payload, want) || got.qpn != q.QPN() {
				t.Errorf("%s, %d bytes of ours: Linux has %d from queue pair %d, received: %t", family, n, len(got.payload), got.qpn, ok)
			} else {
				checkGRH(t, got.grh, f.ours, f.linux)
			}
		}
		burst(t, q, l, f.linux)

		// Of a wrong key, ours to Linux. A good datagram shows that all before it was looked at.
		pkeys, qkeys := l.counters()
		send(q, otherQKey, pattern(8))
		p := h.ourQP(t, d, verbs.DatagramConfig{Local: f.ours, QKey: qkey, PKey: otherPKey})
		send(p, qkey, pattern(9))
		send(q, qkey, pattern(10))
		if got, ok := l.recv(patience); !ok || len(got.payload) != 10 {
			t.Errorf("%s: Linux took a datagram of %d bytes, want the one with its keys", family, len(got.payload))
		}
		if nowP, nowQ := l.counters(); nowP != pkeys+1 || nowQ != qkeys+1 {
			t.Errorf("%s: Linux counts %d wrong P_Keys and %d wrong Q_Keys more, want 1 and 1", family, nowP-pkeys, nowQ-qkeys)
		}
		// Linux to ours.
		l.send(f.ours, q.QPN(), otherQKey, pattern(8))
		l.send(f.ours, p.QPN(), qkey, pattern(9)) // its P_Key is 0xffff
		l.send(f.ours, q.QPN(), qkey, pattern(10))
		if got := received(t, q); len(got.Payload) != 10 {
			t.Errorf("%s: a datagram of %d bytes was taken, want the one with our keys", family, len(got.Payload))
		}
		eventually(t, "the wrong P_Key is counted", func() bool { return p.Dropped().PKey == 1 })
		if drops := q.Dropped(); drops != (verbs.DatagramDrops{QKey: 1}) {
			t.Errorf("%s: dropped are %+v, want one Q_Key", family, drops)
		}

		// The number of all queue pairs. Linux looks for the group that is the
		// IP destination, so it delivers no copies sent to its address.
		if err := q.Attach([16]byte{0xff, 0x12}); err != nil {
			t.Fatal(err)
		}
		l.send(f.ours, verbs.MulticastQPN, qkey, pattern(11))
		if got := received(t, q); len(got.Payload) != 11 || !got.Multicast {
			t.Errorf("%s: multicast of Linux: %d bytes came, multicast %t", family, len(got.Payload), got.Multicast)
		}
		if _, err := q.Send([]verbs.Datagram{{Payload: pattern(12), Peer: f.linux, QPN: verbs.MulticastQPN, QKey: qkey}}); err != nil {
			t.Fatal(err)
		}
		send(q, qkey, pattern(13))
		if got, ok := l.recv(patience); !ok || len(got.payload) != 13 {
			t.Errorf("%s: Linux took a datagram of %d bytes, want 13: not the copy", family, len(got.payload))
		}
	}
}

// burst sends datagrams of one size at once. They may leave as one segmented send,
// with IP identifications that count up.
func burst(t *testing.T, q verbs.DatagramQP, l *linuxQP, to netip.Addr) {
	t.Helper()
	var msgs []verbs.Datagram
	for i := range 16 {
		msgs = append(msgs, verbs.Datagram{Payload: append([]byte{byte(i)}, pattern(999)...), Peer: to, QPN: l.qpn, QKey: qkey})
	}
	if _, err := q.Send(msgs); err != nil {
		t.Fatal(err)
	}
	for i, m := range msgs {
		if got, ok := l.recv(patience); !ok || !bytes.Equal(got.payload, m.Payload) {
			t.Fatalf("datagram %d of a burst to %s: Linux has %d bytes, received: %t", i, to, len(got.payload), ok)
		}
	}
}

// checkGRH checks the headers that Linux delivers in front of a datagram: those
// of IPv4 in the last 20 octets, those of IPv6 in all.
func checkGRH(t *testing.T, grh []byte, src, dst netip.Addr) {
	t.Helper()
	at, version := 0, byte(6)
	if src.Is4() {
		at, version = 20, 4
	}
	n := len(src.AsSlice())
	if ip := grh[at:]; ip[0]>>4 != version || !bytes.Equal(ip[len(ip)-2*n:len(ip)-n], src.AsSlice()) || !bytes.Equal(ip[len(ip)-n:], dst.AsSlice()) {
		t.Errorf("the headers of %s to %s are %x", src, dst, grh)
	}
}

// TestIP32_LinuxIsANeighbour: a queue pair of Linux speaks IPoIB with an
// interface of ours. It asks by ARP, the interface answers, and then pings the
// address that it has learned.
func TestIP32_LinuxIsANeighbour(t *testing.T) {
	h := newCable(t)
	d := h.device(t, ours4)
	var ib *dev.Interface
	h.in(func() (err error) {
		ib, err = dev.Open(dev.Config{Name: "ib0", Fabric: d, Local: ours4, Peers: []netip.Addr{rxe4}, QKey: qkey, Logger: slog.New(slog.DiscardHandler)})
		return err
	})
	t.Cleanup(func() { ib.Close() })
	ourIP, linuxIP := netip.MustParseAddr("192.168.60.2"), netip.MustParseAddr("192.168.60.1")
	h.run("ip addr add 192.168.60.2/24 dev ib0 && ip link set ib0 up")
	eventually(t, "ib0 has carrier", ib.Carrier)
	l := newLinuxQP(t, rxe4, qkey)
	linux := wire.NewAddress(0, l.qpn, wire.GID(l.gid.As16()))

	// W-04: the request goes to the broadcast group.
	var reply wire.Frame
	eventually(t, "ARP is answered", func() bool {
		request := wire.NewARP(wire.ARPFields{Op: wire.ARPRequest, SenderHW: linux, SenderIP: linuxIP, TargetIP: ourIP})
		l.send(ours4, verbs.MulticastQPN, qkey, wire.AppendFrame(nil, wire.TypeARP, request))
		got, ok := l.recv(5 * time.Second)
		reply = got.payload
		return ok && reply.Valid() && reply.Type() == wire.TypeARP && wire.ARP(reply.Payload()).Op() == wire.ARPReply
	})
	if a := wire.ARP(reply.Payload()); !a.Valid() || len(a) != wire.ARPLen {
		t.Fatalf("the reply is %x", reply)
	}
	want := wire.ARPFields{Op: wire.ARPReply, SenderHW: ib.Address(), SenderIP: ourIP, TargetHW: linux, TargetIP: linuxIP}
	if got := wire.ARP(reply.Payload()).Fields(); got != want {
		t.Errorf("the reply is %+v, want %+v", got, want)
	}

	// An echo request of our kernel, answered by the queue pair of Linux.
	c := h.listen("ip4:icmp", ourIP.String())
	answers := make(chan []byte, 100)
	go func() {
		b := make([]byte, 200)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			if from.String() == linuxIP.String() {
				answers <- bytes.Clone(b[:n])
			}
		}
	}()
	echo := []byte{8, 0, 0, 0, 0, 77, 0, 1, 'l', 'i', 'n', 'k'}
	sum := checksum(echo)
	echo[2], echo[3] = byte(sum>>8), byte(sum)
	eventually(t, "the echo request is answered", func() bool {
		if _, err := c.WriteTo(echo, &net.IPAddr{IP: linuxIP.AsSlice()}); err != nil {
			t.Fatal(err)
		}
		for {
			got, ok := l.recv(2 * time.Second)
			if !ok {
				return false
			}
			f := wire.Frame(got.payload)
			if f.Valid() && f.Type() == wire.TypeARP { // our address is confirmed
				l.send(ours4, ib.Address().QPN(), qkey, wire.AppendFrame(nil, wire.TypeARP, wire.NewARP(wire.ARPFields{
					Op: wire.ARPReply, SenderHW: linux, SenderIP: linuxIP, TargetHW: ib.Address(), TargetIP: ourIP})))
				continue
			}
			if f.Valid() && f.Type() == wire.TypeIPv4 && bytes.HasSuffix(f.Payload(), echo) {
				l.send(ours4, ib.Address().QPN(), qkey, wire.AppendFrame(nil, wire.TypeIPv4, echoReply(f.Payload())))
				break
			}
		}
		select {
		case a := <-answers:
			return bytes.HasSuffix(a, echo[4:]) && a[0] == 0
		case <-time.After(2 * time.Second):
			return false
		}
	})
	for _, n := range ib.Neighbors() {
		if n.IP == linuxIP && !n.Address.SamePort(linux) {
			t.Errorf("the neighbour is %s, want %s", n.Address, linux)
		}
	}

	// Frames of Linux with another Q_Key, and with a false sender, are dropped.
	before := ib.Stats()
	false1 := wire.NewAddress(0, l.qpn+1, wire.GID(l.gid.As16()))
	l.send(ours4, ib.Address().QPN(), otherQKey, wire.AppendFrame(nil, wire.TypeARP, wire.NewARP(wire.ARPFields{Op: wire.ARPRequest, SenderHW: linux, SenderIP: linuxIP, TargetIP: ourIP})))
	l.send(ours4, ib.Address().QPN(), qkey, wire.AppendFrame(nil, wire.TypeARP, wire.NewARP(wire.ARPFields{Op: wire.ARPRequest, SenderHW: false1, SenderIP: linuxIP, TargetIP: ourIP})))
	eventually(t, "both are counted", func() bool {
		s := ib.Stats()
		return s.Fabric.QKey == before.Fabric.QKey+1 && s.Neigh.Spoofed == before.Neigh.Spoofed+1
	})
}

// echoReply returns the answer to an echo request in an IPv4 packet.
func echoReply(request []byte) []byte {
	b := bytes.Clone(request)
	copy(b[12:16], request[16:20])
	copy(b[16:20], request[12:16])
	m := b[int(b[0]&15)*4:]
	m[0], m[2], m[3] = 0, 0, 0
	sum := checksum(m)
	m[2], m[3] = byte(sum>>8), byte(sum)
	return b
}

func checksum(b []byte) uint16 {
	var n uint32
	for i := 0; i+1 < len(b); i += 2 {
		n += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for n > 0xffff {
		n = n>>16 + n&0xffff
	}
	return ^uint16(n)
}
