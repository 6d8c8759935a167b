package server

// DATA PATH. A pacer wakes its pump when a request that waits for its budget may
// begin. It is a source of the pump with a timer for its descriptor. A pump without
// such requests pays one comparison a turn.

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

// pumpTimer belongs to the owner of its pump.
type pumpTimer struct {
	fd    int   // timerfd; -1: the pump is virtual, and looks often enough
	next  int64 // when to look again, on the clock of package latency; 0: never
	runs  bool  // the timer is set
	timer unix.ItimerSpec
	buf   [8]byte
}

func newPacer(virtual bool) (*pumpTimer, error) {
	p := &pumpTimer{fd: -1}
	if virtual {
		return p, nil
	}
	var err error
	if p.fd, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return nil, fmt.Errorf("timerfd_create: %w", err)
	}
	return p, nil
}

func (p *pumpTimer) close() {
	if p.fd >= 0 {
		_ = unix.Close(p.fd)
	}
}

// wakeAt asks for a turn of the pump at a time.
func (p *pumpTimer) wakeAt(at int64) {
	if p.next == 0 || at < p.next {
		p.next = at
	}
}

// Poll counts as work when the time has come: the queues look at their waiting
// requests in this turn or in the next one.
func (p *pumpTimer) Poll() int {
	if p.next == 0 || latency.Now() < p.next {
		return 0
	}
	p.next = 0
	return 1
}

func (p *pumpTimer) Arm() bool {
	if p.next == 0 || p.fd < 0 {
		return true
	}
	left := p.next - latency.Now()
	if left <= 0 {
		return false
	}
	p.runs = true
	p.setTimer(left)
	return true
}

func (p *pumpTimer) Disarm() {
	if !p.runs {
		return
	}
	p.runs = false
	p.setTimer(0)
	_, _ = unix.Read(p.fd, p.buf[:])
}

// setTimer lets the timer fire in some ns, or never for 0.
func (p *pumpTimer) setTimer(ns int64) {
	p.timer.Value = unix.NsecToTimespec(ns)
	_ = unix.TimerfdSettime(p.fd, 0, &p.timer, nil)
}

func (p *pumpTimer) FD() int { return p.fd }
