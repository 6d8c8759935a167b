package dev

import (
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/gso"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// receive receives datagrams of the fabric until the interface is closed. Each
// is received behind spare bytes, so that the kernel's header takes the place
// of the encapsulation header.
func (i *Interface) receive() {
	bufs := make([][]byte, batch)
	for k := range bufs {
		bufs[k] = make([]byte, spare+i.qp.MaxPayload())
	}
	msgs := make([]verbs.Datagram, batch)
	out, joiner := outgoing{i: i}, gso.NewJoiner(tun.HeaderLen)
	for {
		for k := range msgs {
			msgs[k].Payload = bufs[k][spare:]
		}
		n, err := i.qp.Receive(msgs)
		if err != nil {
			return // closed
		}
		i.counters.rxWakeups.Add(1)
		for k := range msgs[:n] {
			m := &msgs[k]
			i.arrived(wire.NewAddress(0, m.QPN, i.paths.GID(m.Peer)), m.Multicast, bufs[k][:spare+len(m.Payload)], &out, joiner)
		}
		i.passJoined(joiner)
		out.flush()
		i.wake()
		i.moderate(n)
	}
}

// arrived handles a received frame and returns its verdict. b is spare bytes
// and the frame. If j is nil packets are not joined.
func (i *Interface) arrived(src wire.Address, multicast bool, b []byte, out *outgoing, j *gso.Joiner) verdict {
	v := i.frame(src, multicast, b[spare:], out)
	if a := i.above.Load(); a != nil {
		if v != dropped {
			a.Receive(b[spare:])
		}
	} else if v == passed {
		i.pass(b, multicast, j)
	}
	return v
}

// verdict is the result of checking a received frame.
type verdict uint8

const (
	dropped verdict = iota // not valid, or not for this interface
	taken                  // ARP or neighbour discovery; the interface has handled it
	passed                 // for the kernel
)

// frame checks a received frame and handles ARP and neighbour discovery. src is
// the address of its sender.
func (i *Interface) frame(src wire.Address, multicast bool, frame wire.Frame, out *outgoing) verdict {
	now := time.Now()
	if src.SamePort(i.local) {
		i.counters.rxOwn.Add(1)
		return dropped
	}
	if !frame.Valid() {
		i.counters.rxDropped.Add(1)
		return dropped
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	to := i.Address()
	if multicast {
		to = i.Broadcast()
		if ip, ok := wire.Destination(frame.Type(), frame.Payload()); ok {
			if mgid, err := i.link.Multicast(ip); err == nil {
				to = wire.MulticastAddress(mgid)
			}
		}
	}
	i.capture(src, to, frame)
	p := frame.Payload()
	switch frame.Type() {
	case wire.TypeARP:
		i.sendFrames(now, i.neigh.HandleARP(now, src, p, nil), out)
		return taken
	case wire.TypeIPv4, wire.TypeIPv6:
		if _, ok := wire.Destination(frame.Type(), p); !ok {
			i.counters.rxDropped.Add(1)
			return dropped
		}
		if frame.Type() == wire.TypeIPv6 && i.discovery(now, src, p, out) {
			return taken
		}
		return passed
	}
	i.counters.rxUnknownType.Add(1)
	return dropped
}

// discovery handles a message of neighbour discovery about link-layer
// addresses. It reports whether p was one. i.mu is held.
func (i *Interface) discovery(now time.Time, src wire.Address, p []byte, out *outgoing) bool {
	switch wire.NDType(p) {
	case wire.NDNeighborSolicit, wire.NDNeighborAdvert:
		i.sendFrames(now, i.neigh.HandleND(now, src, p, nil), out)
		return true
	case wire.NDRedirect:
		return true // its neighbour is one that the kernel cannot resolve
	}
	return false
}

// deliver gives the kernel the packet behind the first HeaderLen bytes of b.
func (i *Interface) deliver(b []byte, multicast bool) {
	clear(b[:tun.HeaderLen])
	if err := i.tun.Write(b); err != nil {
		i.counters.rxDropped.Add(1) // the interface is down, or the packet is not valid
		return
	}
	i.counters.rxPackets.Add(1)
	i.counters.rxBytes.Add(uint64(len(b) - tun.HeaderLen))
	if multicast {
		i.counters.multicast.Add(1)
	}
}
