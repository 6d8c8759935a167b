//go:build linux && cgo && ibverbs

package ibverbs

// #include "lib.h"
import "C"

import (
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. A turn of the owner:
//
//	Poll             requests of other goroutines; then one crossing into C, to
//	                 post the requests of PostSend and PostRecv and take completions
//	reap             completions become those of the seam
//	finish           connections that ended: their requests are flushed
//	Arm              the last look before the owner sleeps

// compQueue implements verbs.CQ.
type compQueue struct {
	softverbs.Pending[*qp]
	dev  *Device
	c    *cCQ
	epfd int

	// Owner only. The arrays are C's.
	sends    []cSend
	sges     []C.struct_ibv_sge
	recvs    []cRecv
	wcs      []cWC
	nsend    int
	nsge     int
	nrecv    int
	at, have int   // of wcs: taken from C and not handed over yet
	drained  []*qp // their queue pairs are gone, completions of theirs may wait
	ended    []*qp // to flush

	slots atomic.Pointer[[]atomic.Pointer[qp]]

	mu   sync.Mutex
	gens []uint16 // by slot: how often it was used
	free []int
}

const (
	slotShift = 48
	genShift  = 32
	maxSlots  = 1 << 15
	spareCQEs = 64
)

// CreateCQ implements verbs.Device.
func (d *Device) CreateCQ(depth int) (verbs.CQ, error) {
	if depth > d.maxCQE {
		return nil, fmt.Errorf("create completion queue on %s: %d entries, it has at most %d", d.info.Name, depth, d.maxCQE)
	}
	c := &compQueue{dev: d}
	if err := errnoOf(C.rv_create_cq(d.ctx, C.int(min(depth+spareCQEs, d.maxCQE)), &c.c)); err != nil {
		return nil, fmt.Errorf("create completion queue on %s with %d entries: %w", d.info.Name, depth, err)
	}
	c.sends, c.sges = c.c.sends[:], c.c.sges[:]
	c.recvs, c.wcs = c.c.recvs[:], c.c.wcs[:]
	c.slots.Store(new([]atomic.Pointer[qp]))
	if err := c.openFDs(); err != nil {
		C.rv_destroy_cq(c.c)
		return nil, fmt.Errorf("create completion queue on %s: %w", d.info.Name, err)
	}
	return c, nil
}

func (c *compQueue) openFDs() (err error) {
	if c.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll: %w", err)
	}
	if err = c.OpenFD(); err != nil {
		unix.Close(c.epfd)
		return err
	}
	defer func() {
		if err != nil {
			c.closeFDs()
		}
	}()
	for _, fd := range []int{c.WakeFD(), int(C.rv_cq_fd(c.c))} {
		ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
		if err = unix.EpollCtl(c.epfd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
			return fmt.Errorf("epoll: %w", err)
		}
	}
	return nil
}

func (c *compQueue) closeFDs() {
	unix.Close(c.epfd)
	unix.Close(c.WakeFD())
}

// FD implements verbs.CQ.
func (c *compQueue) FD() int { return c.epfd }

// nextSend returns the place of the next send, with room for n elements.
func (c *compQueue) nextSend(n int) *cSend {
	if c.nsend == len(c.sends) || c.nsge+n > len(c.sges) {
		c.Flush()
	}
	c.nsend++
	return &c.sends[c.nsend-1]
}

func (c *compQueue) addSGE(g *verbs.SGE) {
	s := &c.sges[c.nsge]
	s.addr, s.length, s.lkey = addrOf(g.Buf), C.uint32_t(len(g.Buf)), C.uint32_t(g.LKey)
	c.nsge++
}

// nextRecv returns the place of the next receive.
func (c *compQueue) nextRecv() *cRecv {
	if c.nrecv == len(c.recvs) {
		c.Flush()
	}
	c.nrecv++
	return &c.recvs[c.nrecv-1]
}

// Poll implements verbs.CQ.
func (c *compQueue) Poll(wcs []verbs.WC) int {
	if c.Asked() {
		c.runControl()
	}
	n := c.reapCompletions(wcs)
	if c.at == c.have && n < len(wcs) {
		empty := c.pollC(len(wcs)-n) == 0
		n += c.reapCompletions(wcs[n:])
		if empty {
			c.ended = append(c.ended, c.drained...)
			c.drained = c.drained[:0]
		}
	} else {
		c.Flush()
	}
	if len(c.ended) > 0 {
		n += c.flushEnded(wcs[n:])
	}
	return n
}

// Flush implements verbs.CQ.
func (c *compQueue) Flush() {
	if c.nsend+c.nrecv > 0 {
		c.pollC(0)
	}
}

// pollC crosses into C. With room for completions none may wait in wcs.
func (c *compQueue) pollC(room int) int {
	got := int(C.rv_turn(c.c, C.int(c.nrecv), C.int(c.nsend), C.int(min(room, len(c.wcs)))))
	c.nrecv, c.nsend, c.nsge = 0, 0, 0
	if room > 0 {
		c.at, c.have = 0, got
	}
	if c.c.nfailures != 0 {
		c.postFailed()
	}
	return got
}

// reapCompletions hands over completions that C has left in wcs.
func (c *compQueue) reapCompletions(wcs []verbs.WC) (n int) {
	for ; c.at < c.have && n < len(wcs); c.at++ {
		w := &c.wcs[c.at]
		if q := c.findQP(uint64(w.wr_id)); q != nil && q.fillCompletion(w, &wcs[n]) {
			n++
		}
	}
	return n
}

// findQP finds the queue pair of a wr_id.
func (c *compQueue) findQP(id uint64) *qp {
	slots := *c.slots.Load()
	slot := id >> slotShift
	if slot >= uint64(len(slots)) {
		return nil
	}
	if q := slots[slot].Load(); q != nil && q.slot == id&^(1<<genShift-1) {
		return q
	}
	return nil
}

// flushEnded flushes connections that have ended.
func (c *compQueue) flushEnded(wcs []verbs.WC) (n int) {
	for len(c.ended) > 0 && n < len(wcs) {
		k, last := c.ended[0].flushRequests(wcs[n:])
		n += k
		if !last {
			break
		}
		c.ended = c.ended[1:]
	}
	return n
}

// postFailed ends the connections with requests that the library refused.
func (c *compQueue) postFailed() {
	for i := range c.c.failures[:c.c.nfailures] {
		f := &c.c.failures[i]
		q := c.findQP(uint64(f.wr_id))
		if q == nil || q.closing || !q.inPhase(phaseUp) {
			continue // it is ending
		}
		c.dev.f.cfg.Logger.Error("ibverbs: the device does not take a request", "device", c.dev.info.Name, "remote", q.RemoteAddr(), "err", errnoOf(f.err))
		q.Disconnect()
	}
	c.c.nfailures = 0
}

// Arm implements verbs.CQ.
func (c *compQueue) Arm() bool {
	c.Flush()
	if c.Asked() || c.at < c.have || len(c.ended)+len(c.drained) > 0 {
		return false
	}
	if C.rv_arm(c.c) != 0 {
		return false
	}
	return c.pollC(len(c.wcs)) == 0
}

// Control path.

// runControl handles the requests of other goroutines. Owner.
func (c *compQueue) runControl() {
	var b [8]byte
	unix.Read(c.WakeFD(), b[:])
	list := c.Take()
	c.Flush() // nothing of a queue pair that is to go may wait for the next turn
	for _, q := range list {
		switch {
		case q.inPhase(phaseEnding) && !q.closing:
			q.closing = true
			go q.destroyQP()
		case q.inPhase(phaseGone):
			c.drained = append(c.drained, q)
		}
	}
}

// addQP gives q a slot.
func (c *compQueue) addQP(q *qp) error {
	if c.Closed() {
		return verbs.ErrClosed
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.free) == 0 && !c.growSlots() {
		return fmt.Errorf("the completion queue has %d queue pairs already", maxSlots)
	}
	slot := c.free[len(c.free)-1]
	c.free = c.free[:len(c.free)-1]
	c.gens[slot]++
	q.slot = uint64(slot)<<slotShift | uint64(c.gens[slot])<<genShift
	(*c.slots.Load())[slot].Store(q)
	return nil
}

func (c *compQueue) growSlots() bool {
	old := *c.slots.Load()
	if len(old) == maxSlots {
		return false
	}
	table := make([]atomic.Pointer[qp], max(16, 2*len(old)))
	for i := range old {
		table[i].Store(old[i].Load())
	}
	for slot := len(table) - 1; slot >= len(old); slot-- {
		c.free = append(c.free, slot)
	}
	c.gens = append(c.gens, make([]uint16, len(table)-len(old))...)
	c.slots.Store(&table)
	return true
}

// removeQP takes the slot of q back.
func (c *compQueue) removeQP(q *qp) {
	c.mu.Lock()
	defer c.mu.Unlock()
	slot := int(q.slot >> slotShift)
	if (*c.slots.Load())[slot].CompareAndSwap(q, nil) {
		c.free = append(c.free, slot)
	}
}

// Close implements verbs.CQ.
func (c *compQueue) Close() error {
	return c.Shut(func() error {
		if err := errnoOf(C.rv_destroy_cq(c.c)); err != nil {
			return fmt.Errorf("close completion queue of %s: %w", c.dev.info.Name, err)
		}
		c.closeFDs()
		return nil
	})
}
