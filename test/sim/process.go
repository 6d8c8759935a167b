package sim

import (
	"context"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

// process is the common part of storage and front: one process of a plugin.
type process struct {
	supervise.Process // the API towards the daemon

	w      *world
	number int
	frozen atomic.Bool  // it is stopped, as by SIGSTOP
	deaf   atomic.Bool  // calls of its control API do not return
	late   atomic.Int64 // for so long it works on after the daemon has seen its end

	once  sync.Once
	ended chan struct{} // it does not work any more
	left  func()        // gives back the resources of the process
}

// begin enters p in the world.
func (p *process) begin(w *world, left func()) {
	p.w, p.number, p.ended, p.left = w, w.number(), make(chan struct{}), left
	w.mu.Lock()
	defer w.mu.Unlock()
	w.processes = append(w.processes, p)
}

// Kill ends the process. Operations that it has begun go on.
func (p *process) Kill() {
	if late := time.Duration(p.late.Load()); late > 0 {
		time.AfterFunc(late, p.die)
	} else {
		p.die()
	}
	p.Process.Kill()
}

// Stop is the daemon's orderly end.
func (p *process) Stop(ctx context.Context) error {
	err := p.Process.Stop(ctx)
	p.die()
	return err
}

func (p *process) die() {
	p.once.Do(func() { close(p.ended) })
	p.left()
}

func (p *process) dead() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// serves reports whether the process goes on with a queue that the daemon has closed
// or not.
func (p *process) serves(closed bool) bool { return !p.dead() && (!closed || p.late.Load() > 0) }

// answering waits while the process is frozen or deaf.
func (p *process) answering(ctx context.Context) error {
	for p.frozen.Load() || p.deaf.Load() {
		select {
		case <-time.After(5 * time.Millisecond):
		case <-p.ended:
			return syscall.EIO
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// proc returns the process itself, of whichever plugin it is.
func (p *process) proc() *process { return p }
