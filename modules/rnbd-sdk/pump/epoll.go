package pump

import (
	"encoding/binary"
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// one is the number 1 as eventfd takes it: 64 bits in host order.
var one = binary.NativeEndian.AppendUint64(nil, 1)

func (p *Pump) openFDs() (err error) {
	if p.gate, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll_create1: %w", err)
	}
	if p.sourcesFD, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("epoll_create1: %w", err)
	}
	if p.wakeFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	for _, fd := range []int{p.sourcesFD, p.wakeFD} {
		if err := control(p.gate, unix.EPOLL_CTL_ADD, fd, unix.EPOLLIN); err != nil {
			return fmt.Errorf("epoll_ctl: %w", err)
		}
	}
	return p.openParking()
}

func (p *Pump) closeFDs() {
	p.closeParking()
	for _, fd := range []*int{&p.gate, &p.sourcesFD, &p.wakeFD} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
}

// control adds or changes a descriptor. The descriptors are edge-triggered:
// one that woke the thread need not be drained before it sleeps again.
func control(epfd, op, fd int, events uint32) error {
	ev := unix.EpollEvent{Events: events | unix.EPOLLET, Fd: int32(fd)}
	return unix.EpollCtl(epfd, op, fd, &ev)
}

func (p *Pump) watch(fd int, s Source) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.state == stopped {
		return ErrStopped
	}
	if fd < 0 || p.virtual() {
		return nil
	}
	events := uint32(unix.EPOLLIN)
	if m, ok := s.(eventMask); ok {
		events = m.Events()
	}
	return control(p.sourcesFD, unix.EPOLL_CTL_ADD, fd, events)
}

func (p *Pump) unwatch(fd int) {
	if fd >= 0 && p.sourcesFD >= 0 {
		unix.EpollCtl(p.sourcesFD, unix.EPOLL_CTL_DEL, fd, nil)
	}
}

// watchSources sets whether events of the sources wake the sleeping thread. They do
// not while a caller drives. Events that the caller has not consumed wake the thread
// when the sources are watched again.
func (p *Pump) watchSources(on bool) {
	if p.parked {
		p.watchParking(on)
		return
	}
	var events uint32
	if on {
		events = unix.EPOLLIN
	}
	control(p.gate, unix.EPOLL_CTL_MOD, p.sourcesFD, events)
}

// wait blocks until a source or a kick wakes the thread. It tells the scheduler
// that it blocks: during a raw system call the garbage collector could not start.
// Signals of the runtime may interrupt it, and it goes on.
func (p *Pump) wait() error {
	var events [2]unix.EpollEvent
	for {
		_, err := unix.EpollWait(p.gate, events[:], -1)
		if err != unix.EINTR {
			return err
		}
	}
}

// yield gives the CPU to another runnable thread, if there is one.
func yield() { syscall.RawSyscall(syscall.SYS_SCHED_YIELD, 0, 0, 0) }
