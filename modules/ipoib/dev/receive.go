package dev

import (
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/gso"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// receiveLoop receives datagrams of the fabric until the interface is closed. Each
// is received behind i.spare bytes, so that the kernel's headers take the place
// of the encapsulation header.
func (i *Interface) receiveLoop() {
	bufs := make([][]byte, batch)
	for k := range bufs {
		bufs[k] = make([]byte, i.spare+i.qp.MaxPayload())
	}
	msgs := make([]verbs.Datagram, batch)
	out, j := sendBatch{i: i}, &packetJoiner{Joiner: gso.NewJoiner(i.spare + wire.EncapLen)}
	for {
		for k := range msgs {
			msgs[k].Payload = bufs[k][i.spare:]
		}
		n, err := i.qp.Receive(msgs)
		if err != nil {
			return // closed
		}
		i.counters.rxWakeups.Add(1)
		for k := range msgs[:n] {
			m := &msgs[k]
			i.onFrame(wire.NewAddress(0, m.QPN, i.paths.GID(m.Peer)), m.Multicast, bufs[k][:i.spare+len(m.Payload)], &out, j)
		}
		i.passJoined(j)
		out.flush()
		i.wakeTimers()
		i.delayReceive(n)
	}
}

// onFrame handles a received frame and returns its verdict. b is i.spare bytes
// and the frame. If j is nil packets are not joined.
func (i *Interface) onFrame(src wire.Address, multicast bool, b []byte, out *sendBatch, j *packetJoiner) frameVerdict {
	a := i.above.Load()
	v, p := i.checkFrame(src, multicast, b, a == nil, out)
	switch {
	case a != nil && v != dropped:
		a.Receive(b[i.spare:])
	case a == nil && v == passed:
		i.passUp(p, multicast, j)
	}
	return v
}

// frameVerdict is the result of checking a received frame.
type frameVerdict uint8

const (
	dropped frameVerdict = iota // not valid, or not for this interface
	taken                       // ARP or neighbour discovery; the interface has handled it
	passed                      // for the kernel
)

// checkFrame checks a received frame and handles ARP and neighbour discovery. src is
// the address of its sender, b is i.spare bytes and the frame. If it is for the
// kernel, packet has it behind the kernel's headers; those of Ethernet are filled
// in, and then ARP and neighbour discovery are for the kernel, too.
func (i *Interface) checkFrame(src wire.Address, multicast bool, b []byte, kernel bool, out *sendBatch) (v frameVerdict, packet []byte) {
	now, frame := time.Now(), wire.Frame(b[i.spare:])
	i.traceData("received", src, frame)
	if src.SamePort(i.local) {
		i.counters.rxOwn.Add(1)
		return dropped, nil
	}
	if !frame.Valid() {
		i.counters.rxDropped.Add(1)
		return dropped, nil
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
	i.captureFrame(src, to, frame)
	if i.ether != nil && kernel {
		return i.intoEthernet(src, to, b)
	}
	p := frame.Payload()
	switch frame.Type() {
	case wire.TypeARP:
		i.sendFrames(now, i.neigh.HandleARP(now, src, p, nil), out)
		return taken, nil
	case wire.TypeIPv4, wire.TypeIPv6:
		if _, ok := wire.Destination(frame.Type(), p); !ok {
			i.counters.rxDropped.Add(1)
			return dropped, nil
		}
		if frame.Type() == wire.TypeIPv6 && i.onDiscovery(now, src, p, out) {
			return taken, nil
		}
		return passed, b
	}
	i.counters.rxUnknownType.Add(1)
	return dropped, nil
}

// onDiscovery handles a message of neighbour discovery about link-layer
// addresses. It reports whether p was one. i.mu is held.
func (i *Interface) onDiscovery(now time.Time, src wire.Address, p []byte, out *sendBatch) bool {
	switch wire.NDType(p) {
	case wire.NDNeighborSolicit, wire.NDNeighborAdvert:
		i.sendFrames(now, i.neigh.HandleND(now, src, p, nil), out)
		return true
	case wire.NDRedirect:
		return true // its neighbour is one that the kernel cannot resolve
	}
	return false
}

// deliverUp gives the kernel b: room for its virtio_net_hdr, an Ethernet header if
// the interface has them, and the packet.
func (i *Interface) deliverUp(b []byte, multicast bool) {
	clear(b[:tun.HeaderLen])
	if err := i.tun.Write(b); err != nil {
		i.counters.rxDropped.Add(1) // the interface is down, or the packet is not valid
		return
	}
	i.counters.rxPackets.Add(1)
	i.counters.rxBytes.Add(uint64(len(b) - i.spare - wire.EncapLen))
	if multicast {
		i.counters.multicast.Add(1)
	}
}
