package pump

import (
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// A thread that blocks in a system call keeps its place in Go's scheduler for
// up to 10 ms, and while it does, the runtime's monitor thread wakes up some
// fifty times to look after it. That is negligible for a busy pump, but most
// of the work of an idle process. So a pump that is seldom woken parks its
// goroutine in Go's network poller: a wake-up takes two threads then, the
// poller's and the pump's, but the monitor sleeps on.

const (
	// longSleep is the length of a sleep after which the pump is idle and
	// parks. It is longer than the delays of an overloaded machine: there,
	// parking would make it slower still.
	longSleep = 200 * time.Millisecond
	// briskAfter shorter sleeps in a row, and at first, the pump blocks in a
	// system call, the faster way. A heartbeat of many connections takes fewer.
	briskAfter = 8
)

// The netpoller runs only on an idle P. If pumps occupy every P, a parked pump may
// wake 10 ms late, so none parks.
var (
	pumps atomic.Int32 // pumps that run in this process
	procs atomic.Int32 // a pump may park while fewer pumps run; 0 before SetProcs
)

// parking is an epoll set of the pump's descriptors. The netpoller watches it.
// It reports the sources only while the pump is parked.
type parking struct {
	fd   int // of file; -1: none, the pump does not park
	file *os.File
	conn syscall.RawConn
	look func(uintptr) bool
}

// openParking makes the parking epoll set. If the netpoller refuses it, the pump
// never parks.
func (p *Pump) openParking() error {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("epoll_create1: %w", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil { // else os.File does not use the netpoller
		unix.Close(fd)
		return fmt.Errorf("epoll set without blocking: %w", err)
	}
	p.parking.file = os.NewFile(uintptr(fd), "pump "+p.cfg.Name)
	if p.parking.file.SetReadDeadline(time.Time{}) != nil {
		return nil
	}
	if p.parking.conn, err = p.parking.file.SyscallConn(); err != nil {
		return fmt.Errorf("epoll set: %w", err)
	}
	p.parking.fd, p.parking.look = fd, p.woken
	if err := control(fd, unix.EPOLL_CTL_ADD, p.wakeFD, unix.EPOLLIN); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	if err := control(fd, unix.EPOLL_CTL_ADD, p.sourcesFD, 0); err != nil {
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

func (p *Pump) closeParking() {
	if p.parking.file != nil {
		p.parking.file.Close()
		p.parking = parking{fd: -1}
	}
}

// parks reports whether the pump can park.
func (p *Pump) parks() bool { return p.parking.fd >= 0 && pumps.Load() < procs.Load() }

// mayPark reports whether the coming sleep is likely to be long. If so, it
// drains the events of the sources' descriptors. The sources' Arm is called
// next and reports the work that is left.
func (p *Pump) mayPark() bool {
	if !p.parks() || p.brisk >= briskAfter {
		return false
	}
	var events [16]unix.EpollEvent
	for epollNow(p.sourcesFD, events[:]) == len(events) {
	}
	return true
}

// slept records the length of a sleep.
func (p *Pump) slept(d time.Duration) {
	if d >= longSleep {
		p.brisk, p.rested = 0, p.parks()
	} else if p.brisk < briskAfter {
		p.brisk++
	}
}

// watchParking sets whether the sources wake the parked goroutine, once.
func (p *Pump) watchParking(on bool) {
	ev := unix.EpollEvent{Events: unix.EPOLLONESHOT, Fd: int32(p.sourcesFD)}
	if on {
		ev.Events |= unix.EPOLLIN
	}
	unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(p.parking.fd), unix.EPOLL_CTL_MOD, uintptr(p.sourcesFD), uintptr(unsafe.Pointer(&ev)), 0, 0)
}

// woken reports whether the parked goroutine continues. wakeFD is never drained and
// may still report an old kick, so the mode says whether there is a new one.
func (p *Pump) woken(fd uintptr) bool {
	var events [2]unix.EpollEvent
	for _, ev := range events[:epollNow(int(fd), events[:])] {
		if int(ev.Fd) == p.sourcesFD || p.mode.Load() == modeAwake {
			return true
		}
	}
	return false
}

// epollNow collects waiting events without blocking.
func epollNow(fd int, events []unix.EpollEvent) int { return max(epollRaw(fd, events, 0), 0) }

// epollRaw collects events, waiting for the first for up to limit, in whole
// milliseconds; a raw call, since an ordinary one would wake the monitor thread.
// Negative: it was interrupted.
func epollRaw(fd int, events []unix.EpollEvent, limit time.Duration) int {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(fd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)),
		uintptr(limit/time.Millisecond), 0, 0)
	if errno != 0 {
		return -1
	}
	return int(n)
}
