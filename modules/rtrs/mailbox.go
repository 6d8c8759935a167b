package rtrs

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// mailbox holds the functions that a poller's owner is to call. Any goroutine may
// put one in. The owner calls run, arm and disarm.
type mailbox struct {
	fd     int
	full   atomic.Bool // list is not empty
	armed  atomic.Bool // the owner sleeps or is about to
	kicked atomic.Bool // fd was written

	mu     sync.Mutex
	list   []func()
	spare  []func() // of the owner, swapped with list
	closed bool
}

func (m *mailbox) openEvent(epfd int) error {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return err
	}
	m.fd = fd
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)}
	if err := unix.EpollCtl(epfd, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		_ = unix.Close(fd)
		return err
	}
	return nil
}

// putFunc adds f and wakes the owner if it sleeps.
func (m *mailbox) putFunc(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return
	}
	m.list = append(m.list, f)
	m.full.Store(true)
	if m.armed.Swap(false) {
		one := [8]byte{1}
		_, _ = unix.Write(m.fd, one[:])
		m.kicked.Store(true) // after the write, or it would be read too early
	}
}

// run calls the functions in the mailbox and returns their number.
func (m *mailbox) run() int {
	if !m.full.Load() {
		return 0
	}
	m.mu.Lock()
	list := m.list
	m.list, m.spare = m.spare[:0], list
	m.full.Store(false)
	m.mu.Unlock()
	for i, f := range list {
		f()
		list[i] = nil
	}
	return len(list)
}

// armWakeup makes put wake the owner. It returns false if there is a function already.
func (m *mailbox) armWakeup() bool {
	m.armed.Store(true)
	return !m.full.Load()
}

// disarmWakeup ends the effect of arm and drains fd.
func (m *mailbox) disarmWakeup() {
	m.armed.Store(false)
	if m.kicked.Swap(false) {
		var b [8]byte
		_, _ = unix.Read(m.fd, b[:])
	}
}

func (m *mailbox) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	_ = unix.Close(m.fd)
}
