package dev

import (
	"bufio"
	"encoding/json"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/rnbd-go/rnbd/modules/ipoib/registry"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// TestStorm: a member of the link sends ARP requests from more addresses than the
// table of neighbours has room for. The table stays bounded, the neighbour in use
// stays in it, and nothing is left behind.
func TestStorm(t *testing.T) {
	a, _, ia, ib := pair(t)
	a.ping("192.168.50.2")
	goroutines := runtime.NumGoroutine()
	var evil verbs.DatagramQP
	var err error
	a.Do(func() { evil, err = a.fabric.OpenDatagrams(verbs.DatagramConfig{Local: portA, QKey: DefaultQKey}) })
	if err != nil {
		t.Fatal(err)
	}
	own := wire.NewAddress(0, evil.QPN(), wire.AddrGID(portA))
	request := func(n int) verbs.Datagram {
		f := wire.ARPFields{Op: wire.ARPRequest, SenderHW: own, SenderIP: netip.AddrFrom4([4]byte{192, 168, byte(100 + n/250), byte(1 + n%250)}), TargetIP: netip.MustParseAddr("192.168.50.2")}
		return verbs.Datagram{Payload: wire.AppendFrame(nil, wire.TypeARP, wire.NewARP(f)), Peer: portB, QPN: ib.Address().QPN(), QKey: DefaultQKey}
	}
	const storm = 5000
	for n := 0; n < storm; n += 50 {
		var msgs []verbs.Datagram
		for k := range 50 {
			msgs = append(msgs, request(n+k))
		}
		for len(msgs) > 0 {
			sent, err := evil.Send(msgs)
			if err != nil {
				t.Fatal(err)
			}
			msgs = msgs[sent:]
		}
		if n%1000 == 0 {
			a.ping("192.168.50.2")
		}
	}
	eventually(t, "the table is full", func() bool { // datagrams may be lost
		if _, err := evil.Send([]verbs.Datagram{request(int(ib.Stats().RxWakeups) % storm)}); err != nil {
			t.Fatal(err)
		}
		return len(ib.Neighbors()) == 1024
	})
	a.ping("192.168.50.2")
	for _, n := range ib.Neighbors() {
		if n.IP == netip.MustParseAddr("192.168.50.1") && n.Address != ia.Address() {
			t.Errorf("the neighbour in use is %+v", n)
		}
	}
	evil.Close()
	eventually(t, "no goroutine is left", func() bool { return runtime.NumGoroutine() <= goroutines })
}

// liar is a registry that gives wrong parameters of groups.
type liar struct {
	group atomic.Pointer[registry.Group]
	joins atomic.Int32
	event chan registry.Answer // lines that are not asked for
}

func (l *liar) serve(c net.Conn) {
	defer c.Close()
	out := make(chan registry.Answer)
	done := make(chan struct{})
	defer close(done)
	go func() {
		e := json.NewEncoder(c)
		for {
			select {
			case a := <-out:
				e.Encode(a)
			case a := <-l.event:
				e.Encode(a)
			case <-done:
				return
			}
		}
	}()
	for lines := bufio.NewScanner(c); lines.Scan(); {
		var q registry.Request
		if json.Unmarshal(lines.Bytes(), &q) != nil {
			return
		}
		a := registry.Answer{ID: q.ID, Epoch: 1, MGID: q.MGID}
		switch q.Op {
		case "hello":
			a.PKeys, a.Lease = []uint16{0xffff}, 30000
		case "join":
			a.Group = l.group.Load()
			l.joins.Add(1)
		}
		out <- a
	}
}

// TestRegistryLies: an interface does not join a link whose parameters cannot be,
// or are those of another partition. It joins when the registry tells the truth.
func TestRegistryLies(t *testing.T) {
	a, _ := hosts(t, 4200)
	l := &liar{event: make(chan registry.Answer)}
	l.group.Store(&registry.Group{PKey: 0xffff, QKey: 1, MTU: 0xffff}) // the fabric does not carry it
	var listener net.Listener
	var err error
	a.Do(func() { listener, err = net.Listen("tcp", netip.AddrPortFrom(portA, registry.Port).String()) })
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go l.serve(c)
		}
	}()
	c := a.client(portA, wire.AddrGID(portA))
	i, err := a.tryOpen(Config{Registry: c, Peers: []netip.Addr{}})
	if err != nil {
		t.Fatal(err)
	}
	defer i.Close()
	lies := []*registry.Group{
		{PKey: 0x8001, QKey: 1, MTU: 2048},       // of another partition
		{PKey: 0xffff, QKey: 1, MTU: 100},        // no MTU of a link
		{PKey: 0xffff, QKey: 1 << 31, MTU: 2048}, // only privileged senders may use the Q_Key
	}
	for k := 0; ; k++ {
		before := i.Stats().Mcast.Failures
		eventually(t, "the lie is counted", func() bool {
			select {
			case l.event <- registry.Answer{Epoch: 1, PKeys: []uint16{0xffff}}: // so that it does not wait for its back-off
			default:
			}
			return i.Stats().Mcast.Failures > before
		})
		if i.Carrier() || i.MTU() != 2044 {
			t.Errorf("lie %d: carrier %t, MTU %d", k, i.Carrier(), i.MTU())
		}
		if k == len(lies) {
			break
		}
		l.group.Store(lies[k])
	}
	l.group.Store(&registry.Group{PKey: 0xffff, QKey: 7, MTU: 4096})
	eventually(t, "the truth is taken", func() bool {
		select {
		case l.event <- registry.Answer{Epoch: 1, PKeys: []uint16{0xffff}}:
		default:
		}
		return i.Carrier() && i.MTU() == 4092
	})
	if c.Stats().Lies == 0 {
		t.Error("no lie was counted by the client")
	}
}
