package dev

import (
	"net/netip"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/ether"
	"github.com/rnbd-go/rnbd/modules/ipoib/gso"
	"github.com/rnbd-go/rnbd/modules/ipoib/mcast"
	"github.com/rnbd-go/rnbd/modules/ipoib/neigh"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

const (
	batch = 64
	room  = 64 << 10 // for the longest packet that the kernel gives
	// chunk is the size of the memory that is allocated at a time for segments,
	// in bytes.
	chunk = 1 << 20
	// segmented is the size of the segments from which a batch is sent, in
	// bytes. More would leave the caches before they are sent.
	segmented = 256 << 10
)

// transmitLoop sends the packets of the kernel until the interface is closed. Each
// buffer is read behind spare bytes, so that the encapsulation header takes the
// place of the kernel's.
func (i *Interface) transmitLoop() {
	bufs := make([][]byte, batch)
	for k := range bufs {
		bufs[k] = make([]byte, tun.HeaderLen+ether.HeaderLen+room)
	}
	out := sendBatch{i: i, patience: patience}
	for {
		n, err := i.tun.Read(bufs)
		if err != nil {
			return // closed
		}
		now := time.Now()
		i.mu.Lock()
		for _, b := range bufs[:n] {
			if i.sendPacket(now, b, &out); out.used >= segmented {
				i.mu.Unlock()
				out.flush()
				i.mu.Lock()
			}
		}
		i.mu.Unlock()
		out.flush()
		i.wakeTimers()
	}
}

// sendPacket sends a packet of the kernel. b is the kernel's header and the
// packet. i.mu is held.
func (i *Interface) sendPacket(now time.Time, b []byte, out *sendBatch) {
	if len(b) <= tun.HeaderLen || i.above.Load() != nil {
		return
	}
	if i.ether != nil {
		i.fromEthernet(now, b, out)
		return
	}
	h, p := tun.Header(b), b[tun.HeaderLen:]
	etherType := uint16(wire.TypeIPv4)
	if p[0]>>4 == 6 {
		etherType = wire.TypeIPv6
	}
	dst, ok := wire.Destination(etherType, p)
	switch h.GSOType() {
	case tun.GSOTCPv4, tun.GSOTCPv6:
		ok = ok && !dst.IsMulticast() && !i.isBroadcast(dst) && i.eachSegment(h.GSOSize(), etherType, p, out, func(frame []byte) {
			i.sendUnicast(now, dst, etherType, frame, out)
		})
		if !ok {
			i.counters.txDropped.Add(1)
		}
		return
	}
	if !ok || h.GSOType() != tun.GSONone || h.NeedsChecksum() && !i.finishChecksum(h, p) {
		i.counters.txDropped.Add(1)
		return
	}
	if t := wire.NDType(p); etherType == wire.TypeIPv6 && (t == wire.NDNeighborSolicit || t == wire.NDNeighborAdvert) {
		return // the interface does neighbour discovery itself, with addresses that the kernel does not know
	}
	frame := b[tun.HeaderLen-wire.EncapLen:]
	wire.PutEncap(frame, etherType)
	if len(p) > i.mtu { // the MTU of the TUN device is larger
		out.tooBig(frame, i.mtu)
		return
	}
	if dst.IsMulticast() {
		i.snoopGroups(now, etherType, p)
	}
	i.sendTo(now, dst, etherType, frame, out)
}

// sendTo sends a frame to dst, a unicast, multicast or broadcast address. i.mu
// is held.
func (i *Interface) sendTo(now time.Time, dst netip.Addr, etherType uint16, frame []byte, out *sendBatch) {
	if i.isBroadcast(dst) {
		i.sendMulticast(now, i.link.Broadcast(), frame, out)
		return
	}
	if dst.IsMulticast() {
		if mgid, err := i.link.Multicast(dst); err == nil {
			i.sendMulticast(now, mgid, frame, out)
		}
		return
	}
	i.sendUnicast(now, dst, etherType, frame, out)
}

// eachSegment calls send for the segments of a TCP packet that is larger than the
// MTU, with size bytes of payload each. It reports whether the packet could be
// segmented. i.mu is held.
func (i *Interface) eachSegment(size int, etherType uint16, p []byte, out *sendBatch, send func(frame []byte)) bool {
	tooLong := false
	err := gso.TCP(p, size, out.allocSegment, func(s []byte) { // behind the header of out.frame
		if tooLong = tooLong || len(s) > i.mtu; tooLong {
			return
		}
		wire.PutEncap(out.frame, etherType)
		send(out.frame)
	})
	if err != nil || tooLong {
		return false
	}
	i.counters.txSegmented.Add(1)
	return true
}

// udpChecksum is the offset of the checksum in a UDP header. No other transport
// protocol has it there.
const udpChecksum = 6

// finishChecksum completes a checksum that the kernel has left to the device.
// It reports whether the header is valid.
func (i *Interface) finishChecksum(h tun.Header, p []byte) bool {
	start := h.ChecksumStart()
	at := start + h.ChecksumOffset()
	if start > len(p) || at+2 > len(p) {
		return false
	}
	sum := ^wire.Sum(0, p[start:])
	if sum == 0 && h.ChecksumOffset() == udpChecksum {
		sum = 0xffff // in UDP, 0 means that there is no checksum
	}
	p[at], p[at+1] = byte(sum>>8), byte(sum)
	i.counters.txChecksums.Add(1)
	return true
}

// isBroadcast reports whether dst is the broadcast address of the link or of one
// of its IPv4 subnets.
func (i *Interface) isBroadcast(dst netip.Addr) bool {
	if !dst.Is4() {
		return false
	}
	a := dst.As4()
	if a == [4]byte{255, 255, 255, 255} {
		return true
	}
	return slices.ContainsFunc(i.ips, func(p netip.Prefix) bool {
		return p.Addr().Is4() && p.Bits() < 31 && p.Contains(dst) && lastOf(p) == dst
	})
}

// lastOf returns the last address of an IPv4 prefix.
func lastOf(p netip.Prefix) netip.Addr {
	a := p.Addr().As4()
	for bit := p.Bits(); bit < 32; bit++ {
		a[bit/8] |= 0x80 >> (bit % 8)
	}
	return netip.AddrFrom4(a)
}

// snoopGroups follows the groups that the kernel joins and leaves. i.mu is held.
func (i *Interface) snoopGroups(now time.Time, etherType uint16, p []byte) {
	for _, c := range mcast.Snoop(etherType, p) {
		mgid, err := i.link.Multicast(c.Group)
		if err != nil || slices.Contains(alwaysJoined, c.Group) {
			continue
		}
		if c.Join {
			i.groups.Add(now, mgid)
		} else {
			i.groups.Remove(mgid)
		}
	}
}

// sendMulticast sends a frame to a group. If the group is not joined yet, a copy
// waits for the join. i.mu is held.
func (i *Interface) sendMulticast(now time.Time, mgid wire.GID, frame []byte, out *sendBatch) {
	if i.groups.Send(now, mgid, frame) {
		out.addFrame(wire.MulticastAddress(mgid), frame)
	}
}

// sendUnicast sends a frame to the next hop to dst. If its link-layer address is
// not known yet, a copy waits for it. i.mu is held.
func (i *Interface) sendUnicast(now time.Time, dst netip.Addr, etherType uint16, frame []byte, out *sendBatch) {
	hop := dst
	if !i.onLink(dst) {
		var err error
		if hop, err = i.routes.get(now, dst); err != nil {
			i.counters.txDropped.Add(1)
			return
		}
	}
	to, ok, frames := i.neigh.Resolve(now, hop, etherType, frame[wire.EncapLen:], nil)
	i.sendFrames(now, frames, out)
	if ok {
		out.addFrame(to, frame)
	}
}

func (i *Interface) onLink(dst netip.Addr) bool {
	return slices.ContainsFunc(i.ips, func(p netip.Prefix) bool { return p.Contains(dst) })
}

// sendFrames sends frames of package neigh. i.mu is held.
func (i *Interface) sendFrames(now time.Time, frames []neigh.Frame, out *sendBatch) {
	for _, f := range frames {
		i.traceNeighbor(&f)
		frame := wire.AppendFrame(nil, f.Type, f.Packet)
		if f.Dst.IsMulticast() {
			i.sendMulticast(now, f.Dst.GID(), frame, out)
		} else {
			out.addFrame(f.Dst, frame)
		}
	}
}

// sendBatch collects frames under the lock. flush sends them without it.
type sendBatch struct {
	i     *Interface
	msgs  []verbs.Datagram
	chunk []byte // memory for segments; chunk[:used] has those of listed frames
	used  int
	frame []byte // of the last segment

	conns    []connMessage // frames for connections
	patience time.Duration // how long flush waits for room in a connection
	answers  [][]byte      // answers to packets that were too big, behind spare bytes
}

// allocSegment returns memory for a segment of n bytes. It belongs to the frame
// until flush. The encapsulation header of o.frame is in front of it.
func (o *sendBatch) allocSegment(n int) []byte {
	n += wire.EncapLen
	if o.used+n > len(o.chunk) {
		o.chunk, o.used = make([]byte, max(chunk, n)), 0
	}
	o.frame = o.chunk[o.used:][:n:n]
	o.used += n
	return o.frame[wire.EncapLen:]
}

// addFrame lists frame to be sent to the address to. The bytes of frame must not
// change until flush. i.mu is held.
func (o *sendBatch) addFrame(to wire.Address, frame []byte) {
	i := o.i
	if to.IsMulticast() {
		if len(frame) > i.udMTU()+wire.EncapLen {
			o.tooBig(frame, i.udMTU())
			return
		}
		o.countFrame(to, frame)
		for _, p := range i.groupReceivers(to.GID()) {
			if p != i.cfg.Local {
				o.msgs = append(o.msgs, verbs.Datagram{Payload: frame, Peer: p, QPN: verbs.MulticastQPN, QKey: i.cfg.QKey})
			}
		}
		return
	}
	peer, err := i.paths.Endpoint(to.GID())
	if err != nil {
		i.counters.txDropped.Add(1)
		return
	}
	if c := i.connectionTo(peer, to, frame); c != nil {
		o.byConnection(c, to, frame)
		return
	}
	if len(frame) > i.udMTU()+wire.EncapLen {
		o.tooBig(frame, i.udMTU())
		return
	}
	o.countFrame(to, frame)
	o.msgs = append(o.msgs, verbs.Datagram{Payload: frame, Peer: peer, QPN: to.QPN(), QKey: i.cfg.QKey})
}

// countFrame counts and captures a sent frame. i.mu is held.
func (o *sendBatch) countFrame(to wire.Address, frame []byte) {
	i := o.i
	i.traceData("sent", to, frame)
	i.captureFrame(i.Address(), to, frame)
	i.counters.txPackets.Add(1)
	i.counters.txBytes.Add(uint64(len(frame) - wire.EncapLen))
}

// flush sends the listed frames and answers. It drops a datagram that the
// fabric refuses.
func (o *sendBatch) flush() {
	for msgs := o.msgs; len(msgs) > 0; {
		n, err := o.i.qp.Send(msgs)
		if err != nil {
			o.i.counters.txErrors.Add(1)
			n++
		}
		msgs = msgs[min(n, len(msgs)):]
	}
	for _, m := range o.conns {
		if !m.to.Send(m.frame, o.patience) {
			o.i.counters.txDropped.Add(1)
		}
	}
	for _, b := range o.answers {
		o.i.answerKernel(b)
	}
	clear(o.msgs)
	clear(o.conns)
	clear(o.answers)
	o.msgs, o.conns, o.answers, o.used = o.msgs[:0], o.conns[:0], o.answers[:0], 0
}
