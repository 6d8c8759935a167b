package softverbs

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// Queued marks a queue pair as listed in a Pending. A queue pair embeds it.
type Queued struct{ queued bool } // guarded by Pending.mu

func (q *Queued) mark() *bool { return &q.queued }

// Pending is the work that other goroutines have for the owner of a completion
// queue. Its eventfd becomes readable when there is some.
type Pending[Q interface{ mark() *bool }] struct {
	flag atomic.Bool // something is listed
	fd   int         // eventfd

	mu     sync.Mutex
	list   []Q
	calls  []func()
	closed bool
}

// OpenFD makes the eventfd.
func (p *Pending[Q]) OpenFD() (err error) {
	if p.fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("eventfd: %w", err)
	}
	return nil
}

// WakeFD returns the eventfd. Nothing here reads it.
func (p *Pending[Q]) WakeFD() int { return p.fd }

// Asked reports whether Take would return something. Any goroutine.
func (p *Pending[Q]) Asked() bool { return p.flag.Load() }

// Submit asks the owner to look at q. Any goroutine.
func (p *Pending[Q]) Submit(q Q) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || *q.mark() {
		return
	}
	*q.mark() = true
	p.list = append(p.list, q)
	p.wakeOwner()
}

// Call asks the owner to call f. Any goroutine.
func (p *Pending[Q]) Call(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.calls = append(p.calls, f)
		p.wakeOwner()
	}
}

// wakeOwner makes the owner look. mu is held.
func (p *Pending[Q]) wakeOwner() {
	p.flag.Store(true)
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	unix.Write(p.fd, one[:]) // EAGAIN means that it is readable already
}

// Take calls the functions that were left, and returns the queue pairs.
func (p *Pending[Q]) Take() []Q {
	p.mu.Lock()
	list, calls := p.list, p.calls
	p.list, p.calls = nil, nil
	p.flag.Store(false)
	for _, q := range list {
		*q.mark() = false
	}
	p.mu.Unlock()
	for _, f := range calls {
		f()
	}
	return list
}

// Closed reports whether Shut was called. Any goroutine.
func (p *Pending[Q]) Closed() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

var errClosedBefore = errors.New("close completion queue: closed before")

// Shut closes the completion queue: release frees its resources, and nothing
// is listed from then on. An error of release leaves it open; a second call
// returns an error.
func (p *Pending[Q]) Shut(release func() error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return errClosedBefore
	}
	if err := release(); err != nil {
		return err
	}
	p.closed = true
	return nil
}
