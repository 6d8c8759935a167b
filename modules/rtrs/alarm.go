package rtrs

import (
	"fmt"
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// pollerAlarm is a function that the owner of a poller calls at a time that was set
// before. It belongs to that owner.
type pollerAlarm struct {
	f    func(now time.Time) // may set its alarm, or any other, again
	at   int64               // ns since alarms.born; 0: not set
	slot int                 // in alarms.list, from 1; 0: not there
}

// alarmSet are the alarms of one poller. One timer descriptor, in the epoll set that
// the owner sleeps on, is set to the earliest. So alarms that are due together cost
// one wake-up.
type alarmSet struct {
	born  time.Time
	fd    int            // timerfd
	set   int64          // when fd fires; 0: never
	next  int64          // the earliest, or a time before it if stale; 0: none
	stale bool           // next has to be found again
	list  []*pollerAlarm // in no order
}

func (a *alarmSet) openTimer(epfd int) (err error) {
	a.born = time.Now()
	if a.fd, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
		return fmt.Errorf("timerfd_create: %w", err)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(a.fd)}
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, a.fd, &ev); err != nil {
		_ = unix.Close(a.fd)
		return fmt.Errorf("epoll_ctl: %w", err)
	}
	return nil
}

func (a *alarmSet) close() { _ = unix.Close(a.fd) }

// setAlarm sets al to a time, in place of an earlier setting. The zero time clears it.
func (a *alarmSet) setAlarm(al *pollerAlarm, at time.Time) {
	al.at, a.stale = 0, true
	if at.IsZero() {
		a.dropAlarm(al)
		return
	}
	al.at = max(int64(at.Sub(a.born)), 1)
	if al.slot == 0 {
		a.list = append(a.list, al)
		al.slot = len(a.list)
	}
	if a.next == 0 || al.at < a.next {
		a.next = al.at
	}
}

func (a *alarmSet) dropAlarm(al *pollerAlarm) {
	if al.slot == 0 {
		return
	}
	last := a.list[len(a.list)-1]
	a.list[al.slot-1], last.slot = last, al.slot
	a.list[len(a.list)-1] = nil
	a.list, al.slot = a.list[:len(a.list)-1], 0
}

// run calls the alarms that are due and returns their number.
func (a *alarmSet) run(now time.Time) (n int) {
	t := int64(now.Sub(a.born))
	if a.next == 0 || t < a.next {
		return 0
	}
	for i := 0; i < len(a.list); {
		al := a.list[i]
		if al.at > t {
			i++
			continue
		}
		al.at = 0
		al.f(now)
		n++
		if al.at == 0 {
			a.dropAlarm(al)
		} else {
			i++
		}
	}
	a.findEarliest()
	return n
}

// findEarliest sets next to the time of the earliest alarm.
func (a *alarmSet) findEarliest() {
	a.stale, a.next = false, math.MaxInt64
	for _, al := range a.list {
		a.next = min(a.next, al.at)
	}
	if len(a.list) == 0 {
		a.next = 0
	}
}

// armTimer makes fd readable at the time of the earliest alarm. It returns false if one
// is due.
func (a *alarmSet) armTimer() bool {
	if a.stale {
		a.findEarliest()
	}
	wait := time.Duration(0)
	if a.next != 0 {
		if wait = time.Duration(a.next) - time.Since(a.born); wait <= 0 {
			return false
		}
	}
	if a.next != a.set {
		a.set = a.next
		setTimer(a.fd, wait)
	}
	return true
}
