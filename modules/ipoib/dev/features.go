package dev

import (
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/ipoib/ether"
	"github.com/rnbd-go/rnbd/modules/ipoib/gso"
	"github.com/rnbd-go/rnbd/modules/ipoib/tun"
	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// Features are the offloads of an interface: work that it does for the kernel.
// In connected mode all are off.
type Features struct {
	TxChecksum, LSO bool // always on in datagram mode
	RxChecksum      bool // TCP checksums are verified before packets are joined
	LRO             bool // received TCP packets are joined
}

// Features returns the offloads that are on.
func (i *Interface) Features() Features {
	if i.Mode() == Connected {
		return Features{}
	}
	return Features{TxChecksum: true, LSO: true, RxChecksum: !i.noChecksum.Load(), LRO: i.joinsPackets()}
}

// joinsPackets reports whether received packets are joined.
func (i *Interface) joinsPackets() bool {
	return !i.noLRO.Load() && !i.noChecksum.Load() && i.Mode() == Datagram && i.above.Load() == nil
}

// SetRxChecksum turns verification of the checksums of received TCP packets on
// or off. Without it packets are not joined. In connected mode it cannot be
// turned on: unix.EOPNOTSUPP.
func (i *Interface) SetRxChecksum(on bool) error {
	if on && i.Mode() == Connected {
		return fmt.Errorf("check checksums on %s: it is in connected mode: %w", i.Name(), unix.EOPNOTSUPP)
	}
	if !on {
		i.noLRO.Store(true)
	}
	i.noChecksum.Store(!on)
	return nil
}

// SetLRO turns the joining of received TCP packets on or off. The default is
// on. The error is unix.EOPNOTSUPP in connected mode, and if checksums are not
// verified.
func (i *Interface) SetLRO(on bool) error {
	switch {
	case on && i.Mode() == Connected:
		return fmt.Errorf("join packets on %s: it is in connected mode: %w", i.Name(), unix.EOPNOTSUPP)
	case on && i.noChecksum.Load():
		return fmt.Errorf("join packets on %s: checksums are not checked; turn that on first: %w", i.Name(), unix.EOPNOTSUPP)
	}
	i.noLRO.Store(!on)
	return nil
}

// Coalescing delays datagrams, so that more of them are received at once: until
// Frames have come or Wait is over. If Wait is zero they are not delayed. If
// Frames is zero only Wait bounds the delay.
type Coalescing struct {
	Frames int
	Wait   time.Duration
}

// maxCoalescing is the largest value of Frames, and of Wait in microseconds.
const maxCoalescing = 0xffff

// RxCoalescing returns the value set by SetRxCoalescing. The default is zero.
func (i *Interface) RxCoalescing() Coalescing {
	if c := i.coalescing.Load(); c != nil {
		return *c
	}
	return Coalescing{}
}

// SetRxCoalescing sets the delay of received datagrams. The error is
// unix.EINVAL if Frames or the microseconds of Wait are more than 65535. At
// most RecvQueue datagrams wait; the fabric drops further ones.
func (i *Interface) SetRxCoalescing(c Coalescing) error {
	if c.Frames < 0 || c.Frames > maxCoalescing || c.Wait < 0 || c.Wait > maxCoalescing*time.Microsecond {
		return fmt.Errorf("coalescing of %d frames or %s on %s: at most %d, and that many microseconds: %w", c.Frames, c.Wait, i.Name(), maxCoalescing, unix.EINVAL)
	}
	i.coalescing.Store(&c)
	return nil
}

// delayReceive waits as RxCoalescing demands, after n datagrams were received at
// once.
func (i *Interface) delayReceive(n int) {
	c := i.RxCoalescing()
	if c.Wait == 0 || c.Frames > 0 && n >= c.Frames {
		return
	}
	select {
	case <-i.done:
	case <-time.After(c.Wait):
	}
}

// packetJoiner joins packets that have the same Ethernet header, if any.
type packetJoiner struct {
	*gso.Joiner
	header [ether.HeaderLen]byte
}

// passUp gives the kernel a packet, which is joined with others if possible. b is
// that of deliver.
func (i *Interface) passUp(b []byte, multicast bool, j *packetJoiner) {
	if j == nil || !i.joinsPackets() {
		i.deliverUp(b, multicast)
		return
	}
	if i.ether != nil {
		if h := [ether.HeaderLen]byte(b[tun.HeaderLen:]); h != j.header {
			i.passJoined(j)
			j.header = h
		}
	}
	if p := b[i.spare+wire.EncapLen:]; !j.Add(p) {
		i.passJoined(j)
		if !j.Add(p) {
			i.deliverUp(b, multicast)
		}
	}
}

// passJoined gives the kernel the joined packet, if there is one.
func (i *Interface) passJoined(j *packetJoiner) {
	out := j.Take()
	if out.Count == 0 {
		return
	}
	b, head := out.Packet, i.spare+wire.EncapLen
	clear(b[:tun.HeaderLen])
	if i.ether != nil {
		copy(b[tun.HeaderLen:], j.header[:])
	}
	if out.Count > 1 {
		kind := byte(tun.GSOTCPv4)
		if out.V6 {
			kind = tun.GSOTCPv6
		}
		tun.PutGSO(b, kind, head-tun.HeaderLen+out.Header, out.Size, head-tun.HeaderLen+out.IP)
		i.counters.rxJoined.Add(uint64(out.Count))
	}
	if err := i.tun.Write(b); err != nil {
		i.counters.rxDropped.Add(uint64(out.Count))
		return
	}
	i.counters.rxPackets.Add(uint64(out.Count))
	i.counters.rxBytes.Add(uint64(len(b)-head) + uint64((out.Count-1)*out.Header))
}
