package dev

import (
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// receive takes datagrams of the fabric until the interface is closed. Each is
// received behind spare bytes, so that the kernel's header takes the place of the
// encapsulation header.
func (i *Interface) receive() {
	const spare = tun.HeaderLen - wire.EncapLen
	bufs := make([][]byte, batch)
	for k := range bufs {
		bufs[k] = make([]byte, spare+i.qp.MaxPayload())
	}
	msgs := make([]verbs.Datagram, batch)
	out := outgoing{i: i}
	for {
		for k := range msgs {
			msgs[k].Payload = bufs[k][spare:]
		}
		n, err := i.qp.Receive(msgs)
		if err != nil {
			return // closed
		}
		for k := range msgs[:n] {
			v := i.frame(&msgs[k], &out)
			if a := i.above.Load(); a != nil {
				if v != dropped {
					a.Receive(msgs[k].Payload)
				}
				continue
			}
			if v == passed {
				i.deliver(bufs[k][:spare+len(msgs[k].Payload)], msgs[k].Multicast)
			}
		}
		out.flush()
		i.wake()
	}
}

// verdict is what became of a frame.
type verdict uint8

const (
	dropped verdict = iota // it is not valid, or not for this interface
	taken                  // it was about neighbours, and the interface has dealt with it
	passed                 // it is for the kernel
)

// frame looks at a datagram. It returns what became of it.
func (i *Interface) frame(m *verbs.Datagram, out *outgoing) verdict {
	now, frame := time.Now(), wire.Frame(m.Payload)
	src := wire.NewAddress(0, m.QPN, i.paths.GID(m.Peer))
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
	to := i.local
	if m.Multicast {
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

// discovery takes a message of neighbour discovery that is about link-layer
// addresses. It reports whether p was one. i.mu is held.
func (i *Interface) discovery(now time.Time, src wire.Address, p []byte, out *outgoing) bool {
	switch wire.NDType(p) {
	case wire.NDNeighborSolicit, wire.NDNeighborAdvert:
		i.sendFrames(now, i.neigh.HandleND(now, src, p, nil), out)
		return true
	case wire.NDRedirect:
		return true // it would name a neighbour that the kernel cannot resolve
	}
	return false
}

// deliver gives the kernel the packet behind HeaderLen bytes of b.
func (i *Interface) deliver(b []byte, multicast bool) {
	clear(b[:tun.HeaderLen])
	if err := i.tun.Write(b); err != nil {
		i.counters.rxDropped.Add(1) // the interface is down, or the packet is no good
		return
	}
	i.counters.rxPackets.Add(1)
	i.counters.rxBytes.Add(uint64(len(b) - tun.HeaderLen))
	if multicast {
		i.counters.multicast.Add(1)
	}
}
