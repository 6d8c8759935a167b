package loopback

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// linkKey names one direction between two addresses, whatever the ports.
type linkKey struct{ from, to netip.Addr }

// faultyLink has the faults of one direction. Guarded by net.mu.
type faultyLink struct {
	stalled bool
	fabric  Fabric
	held    bool // messages wait for Step
	delay   time.Duration
}

// mayArrive reports whether m may arrive now.
func (l *faultyLink) mayArrive(m *wireMessage) bool {
	return !l.stalled && (!l.held || m.released) && (m.due.IsZero() || !time.Now().Before(m.due))
}

func (n *Network) linkBetween(from, to netip.Addr) *faultyLink {
	k := linkKey{from, to}
	l := n.links[k]
	if l == nil {
		l = &faultyLink{}
		n.links[k] = l
	}
	return l
}

func (n *Network) linkStalled(from, to netip.AddrPort) bool {
	l := n.links[linkKey{from.Addr(), to.Addr()}]
	return l != nil && l.stalled
}

// changeLink applies f to a link and lets everything that waits look again.
func (n *Network) changeLink(from, to netip.Addr, f func(*faultyLink)) {
	f(n.linkBetween(from, to))
	n.progressDials()
	for _, c := range n.conns {
		for _, q := range c.ends {
			q.cq.kickOwner()
		}
	}
}

func (n *Network) kickLater(c *compQueue) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c.kickOwner()
}

// Fabric is how connections differ from those of InfiniBand without faults.
type Fabric uint8

const (
	// Plain is a fabric that loses nothing: what is sent arrives when the link
	// lets it, even if its sender has gone, and then it is complete.
	Plain Fabric = iota
	// Stream is a byte stream, as TCP is. A request is complete when it is on the
	// link, before the peer has it; a link takes 4 MiB. What is on the link arrives
	// before the end of a connection does, also when the connection is cut; a cut of
	// a stalled link loses it.
	Stream
	// Datagrams are lost while nothing arrives. They are sent again later, in order,
	// from the sender's memory as it is then, unless the sender has gone.
	Datagrams
)

// Behave sets the fabric of connections that are made between a and b from now on.
func (n *Network) Behave(a, b netip.Addr, f Fabric) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.linkBetween(a, b).fabric, n.linkBetween(b, a).fabric = f, f
}

// Stall stops all traffic between a and b, in both directions, without any
// notice: connection requests, messages, answers, disconnects. Messages under
// way wait for Resume.
func (n *Network) Stall(a, b netip.Addr) {
	n.StallOneWay(a, b)
	n.StallOneWay(b, a)
}

// StallOneWay lets nothing that from sends arrive at to.
func (n *Network) StallOneWay(from, to netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changeLink(from, to, func(l *faultyLink) { l.stalled = true })
}

// Resume ends Stall: the waiting messages arrive.
func (n *Network) Resume(a, b netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changeLink(a, b, func(l *faultyLink) { l.stalled = false })
	n.changeLink(b, a, func(l *faultyLink) { l.stalled = false })
}

// StallConn lets nothing arrive on the connection with the ends a and b, in any
// order, until it is called again with stalled false; other connections between
// the same addresses go on. It reports whether there was such a connection.
func (n *Network) StallConn(a, b netip.AddrPort, stalled bool) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns {
		x, y := c.ends[1].remote, c.ends[1].local
		if x == a && y == b || x == b && y == a {
			c.pipes[0].shut, c.pipes[1].shut = stalled, stalled
			c.ends[0].cq.kickOwner()
			c.ends[1].cq.kickOwner()
			return true
		}
	}
	return false
}

// Crash ends a device as the death of its process would: its listeners close, its
// connection requests are given up, and its connections die at its end without a
// word to their peers, as on a fabric over datagrams. With reset the peers are told
// at once, as by a host that answers for a dead process, unless a link is stalled.
func (n *Network) Crash(dev verbs.Device, reset bool) {
	_ = dev.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, dl := range slices.Clone(n.dials) {
		if dl.qp.pd.dev == dev {
			n.abandonDial(dl, fmt.Errorf("the device has crashed: %w", syscall.ECONNABORTED))
		}
	}
	for _, c := range slices.Clone(n.conns) {
		for side, q := range c.ends {
			if q.pd.dev != dev {
				continue
			}
			if p := &c.pipes[side]; reset && !p.shut && !p.link.stalled {
				c.sendBye(side)
			}
			q.endQP(verbs.StatusFatal)
		}
	}
}

// Delay lets messages sent between a and b from now on arrive d later.
func (n *Network) Delay(a, b netip.Addr, d time.Duration) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changeLink(a, b, func(l *faultyLink) { l.delay = d })
	n.changeLink(b, a, func(l *faultyLink) { l.delay = d })
}

// Hold keeps every message that from sends to to until Step or Release.
func (n *Network) Hold(from, to netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changeLink(from, to, func(l *faultyLink) { l.held = true })
}

// Release ends Hold.
func (n *Network) Release(from, to netip.Addr) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.changeLink(from, to, func(l *faultyLink) { l.held = false })
}

// Step lets the oldest held message from from to to arrive, and reports
// whether there was one. Disconnects and answers to OpRead are messages too.
func (n *Network) Step(from, to netip.Addr) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	held := n.heldMessages(from, to)
	if len(held) == 0 {
		return false
	}
	oldest := slices.MinFunc(held, func(a, b *wireMessage) int { return int(int64(a.seq - b.seq)) })
	n.changeLink(from, to, func(*faultyLink) { oldest.released = true })
	return true
}

// Held returns the number of messages that wait for Step.
func (n *Network) Held(from, to netip.Addr) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.heldMessages(from, to))
}

func (n *Network) heldMessages(from, to netip.Addr) []*wireMessage {
	var held []*wireMessage
	l := n.linkBetween(from, to)
	for _, c := range n.conns {
		for side := range c.pipes {
			p := &c.pipes[side]
			for i := p.head; p.link == l && i < len(p.msgs); i++ {
				if !p.msgs[i].released {
					held = append(held, &p.msgs[i])
				}
			}
		}
	}
	return held
}

// Cut breaks all connections between a and b at both ends, loses the messages
// under way, but for those of a Stream that is not stalled, and returns the number
// of connections. New ones can be made.
func (n *Network) Cut(a, b netip.Addr) int {
	return n.cutConns(func(x, y netip.AddrPort) bool {
		return x.Addr() == a && y.Addr() == b || x.Addr() == b && y.Addr() == a
	})
}

// CutConn breaks the connection with the ends a and b, in any order, and
// reports whether there was one.
func (n *Network) CutConn(a, b netip.AddrPort) bool {
	return n.cutConns(func(x, y netip.AddrPort) bool {
		return x == a && y == b || x == b && y == a
	}) > 0
}

func (n *Network) cutConns(match func(active, passive netip.AddrPort) bool) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, dl := range slices.Clone(n.dials) {
		if match(dl.src, dl.dst) {
			n.abandonDial(dl, fmt.Errorf("cut: %w", syscall.ECONNRESET))
		}
	}
	count := 0
	for _, c := range slices.Clone(n.conns) {
		if !match(c.ends[1].remote, c.ends[1].local) {
			continue
		}
		count++
		for _, q := range c.ends {
			if c.fabric == Stream {
				q.receiveMessages() // what has arrived can be read
			}
		}
		for _, q := range c.ends {
			q.endQP(verbs.StatusFatal)
		}
	}
	return count
}

// Conns returns the connections that live at one end at least, as pairs of
// active and passive end, in the order of making.
func (n *Network) Conns() [][2]netip.AddrPort {
	n.mu.Lock()
	defer n.mu.Unlock()
	var ends [][2]netip.AddrPort
	for _, c := range n.conns {
		ends = append(ends, [2]netip.AddrPort{c.ends[1].remote, c.ends[1].local})
	}
	return ends
}

// RefuseDial lets requests to dst fail with err, whoever listens; nil ends it.
func (n *Network) RefuseDial(dst netip.AddrPort, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err == nil {
		delete(n.refused, dst)
	} else {
		n.refused[dst] = err
	}
}

// DropListener closes the listener at addr as its end of process would, and
// reports whether there was one.
func (n *Network) DropListener(addr netip.AddrPort) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.listeners[addr]
	if l != nil {
		l.close()
	}
	return l != nil
}
