package dev

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/cm"
	"github.com/rnbd-go/rnbd/modules/ipoib/ether"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Mode is the way in which unicast packets are carried.
type Mode uint8

const (
	Datagram  Mode = iota // by the UD queue pair
	Connected             // by reliable connections to peers in the same mode, else by the UD queue pair
)

// String returns the name of the mode as in Linux's file "mode".
func (m Mode) String() string {
	if m == Connected {
		return "connected"
	}
	return "datagram"
}

// ParseMode parses the name of a mode. The error is unix.EINVAL if there is no
// such mode.
func ParseMode(s string) (Mode, error) {
	for _, m := range []Mode{Datagram, Connected} {
		if s == m.String() {
			return m, nil
		}
	}
	return 0, fmt.Errorf("mode %q: want datagram or connected: %w", s, unix.EINVAL)
}

// patience is the longest time that a packet of the kernel waits for room in a
// connection.
const patience = 100 * time.Millisecond

// Mode returns the mode.
func (i *Interface) Mode() Mode {
	if i.cm.Load() != nil {
		return Connected
	}
	return Datagram
}

// SetMode changes the mode. All neighbours are resolved again. The address of
// the interface is announced, since the mode decides its flags. Connected mode
// makes the MTU 65520 and turns the offloads off. Datagram mode ends the
// connections, makes the MTU at most that of the broadcast group, and turns the
// offloads on. The error is unix.EOPNOTSUPP if the fabric has no connections.
func (i *Interface) SetMode(m Mode) error {
	i.modeMu.Lock()
	defer i.modeMu.Unlock()
	if m == i.Mode() {
		return nil
	}
	var err error
	if m == Connected {
		err = i.connectedMode()
	} else {
		err = i.datagramMode()
	}
	if err != nil {
		return fmt.Errorf("set %s to %s mode: %w", i.Name(), m, err)
	}
	i.cfg.Logger.Info("IPoIB interface has another mode", "name", i.Name(), "mode", m, "mtu", i.MTU())
	return nil
}

func (i *Interface) connectedMode() error {
	select {
	case <-i.done:
		return os.ErrClosed
	default:
	}
	fabric, ok := i.cfg.Fabric.(verbs.ServiceDevice)
	if !ok {
		return fmt.Errorf("the fabric makes no connections by service ID: %w", unix.EOPNOTSUPP)
	}
	out := &sendBatch{i: i} // used by the owner of the connections alone
	c, err := cm.Open(cm.Config{
		Fabric: fabric, Local: i.cfg.Local, PKey: i.cfg.PKey, QPN: i.qp.QPN(), Headroom: i.spare, Logger: i.cfg.Logger,
		Receive: func(peer netip.Addr, qpn uint32, b []byte) {
			if i.onFrame(wire.NewAddress(0, qpn, i.paths.GID(peer)), false, b, out, nil) == taken {
				out.flush()
				i.wakeTimers()
			}
		},
	})
	if err != nil {
		return err
	}
	if err := errors.Join(i.tun.SetMTU(cm.MaxMTU), i.tun.SetOffloads(false)); err != nil {
		return errors.Join(err, i.tun.SetMTU(i.MTU()), i.tun.SetOffloads(true), c.Close())
	}
	i.cfg.Logger.Warn("IPoIB interface drops multicast packets above the MTU of the link", "name", i.Name(), "mtu", i.udMTU())
	i.cm.Store(c)
	i.onAddressChange(wire.FlagRC, cm.MaxMTU)
	return nil
}

func (i *Interface) datagramMode() error {
	mtu := min(i.udMTU(), i.MTU())
	err := errors.Join(i.tun.SetMTU(mtu), i.tun.SetOffloads(true))
	c := i.cm.Swap(nil)
	i.onAddressChange(0, mtu)
	return errors.Join(err, c.Close())
}

// onAddressChange removes all neighbours and announces the address with its new flags.
func (i *Interface) onAddressChange(flags byte, mtu int) {
	now, out := time.Now(), sendBatch{i: i}
	i.mu.Lock()
	i.mtu = mtu
	i.neigh.Flush()
	i.neigh.SetFlags(flags)
	if i.ether != nil {
		i.ether.SetFlags(flags)
	}
	if i.isUp || i.above.Load() != nil {
		i.sendFrames(now, i.neigh.Announce(nil), &out)
	}
	i.mu.Unlock()
	out.flush()
	i.wakeTimers()
}

// connectionTo returns the connection for a frame to an interface, or nil if
// the frame takes the UD queue pair. ARP and neighbour discovery never have a
// connection.
func (i *Interface) connectionTo(peer netip.Addr, to wire.Address, frame wire.Frame) *cm.Conn {
	c := i.cm.Load()
	if c == nil || to.Flags()&wire.FlagRC == 0 || frame.Type() == wire.TypeARP || frame.Type() == wire.TypeIPv6 && wire.NDType(frame.Payload()) != 0 {
		return nil
	}
	conn := c.Lookup(peer, to.QPN())
	if conn == nil { // the manager was closed: the mode changes
		return nil
	}
	if s, _ := conn.State(); s == cm.Refused {
		return nil
	}
	return conn
}

// byConnection adds a frame for a connection to o. If the connection is not up
// yet, the connection keeps a copy. i.mu is held.
func (o *sendBatch) byConnection(c *cm.Conn, to wire.Address, frame []byte) {
	i := o.i
	if c.Wait(frame) {
		return
	}
	state, longest := c.State()
	switch {
	case state != cm.Up:
		i.counters.txDropped.Add(1)
	case len(frame) > longest:
		o.tooBig(frame, longest-wire.EncapLen)
	default:
		o.countFrame(to, frame)
		o.conns = append(o.conns, connMessage{c, frame})
	}
}

// connMessage is a frame to be sent on a connection.
type connMessage struct {
	to    *cm.Conn
	frame []byte
}

// tooBig drops a frame that is longer than the path to its destination allows.
// The kernel or the attached Above is told the MTU of the path, mtu bytes. i.mu
// is held.
func (o *sendBatch) tooBig(frame wire.Frame, mtu int) {
	o.i.counters.txErrors.Add(1)
	if p := wire.TooBig(frame.Type(), frame.Payload(), mtu); p != nil {
		b := make([]byte, o.i.spare, o.i.spare+wire.EncapLen+len(p))
		o.answers = append(o.answers, wire.AppendFrame(b, frame.Type(), p))
	}
}

// answerKernel gives the kernel, or the attached Above, the answer to a packet that
// was too big. b is spare bytes and the answer.
func (i *Interface) answerKernel(b []byte) {
	i.counters.pmtuSent.Add(1)
	if a := i.above.Load(); a != nil {
		a.Receive(b[i.spare:])
		return
	}
	if i.ether != nil {
		i.mu.Lock()
		ether.Header(b[tun.HeaderLen:]).Put(i.ether.Kernel(), router, wire.Frame(b[i.spare:]).Type())
		i.mu.Unlock()
	}
	clear(b[:tun.HeaderLen])
	if err := i.tun.Write(b); err != nil {
		i.counters.rxDropped.Add(1)
	}
}
