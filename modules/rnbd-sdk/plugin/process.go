package plugin

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Process is a running plugin, seen from the host. Its methods may be called
// from any goroutine. Errors of calls keep the errno that the plugin gave;
// calls to a plugin that has ended have ErrExited in the chain.
type Process struct {
	c      Config
	info   Info
	link   grpc.ClientConnInterface // of the three clients
	plugin pluginpb.PluginClient
	disks  pluginpb.StorageClient
	front  pluginpb.FrontendClient
	fds    fdSender // the end of file of its connection is the plugin's

	child    *child                          // nil in process
	kill     func()                          // in process: in place of SIGKILL
	handOver func(token uint64, r *shm.Ring) // in process: rings without descriptors
	cleanup  func()
	confined *confine.Report // nil: it has the rights of its host

	quietly  atomic.Bool // the start failed: no OnExit, no log
	stopping atomic.Bool
	killed   atomic.Bool
	lost     chan struct{} // closed at the end of file of the control socket, or of the main thread
	exited   chan struct{}
	cleaned  chan struct{} // closed after exited, when nothing of the process is left here
	exitErr  error         // read after exited

	mu        sync.Mutex
	abandoned map[uint32]chan struct{} // disks that are closed because the caller of their open gave up
}

func newProcess(c Config, fds fdSender, link grpc.ClientConnInterface) *Process {
	return &Process{
		c:       c,
		link:    link,
		plugin:  pluginpb.NewPluginClient(link),
		disks:   pluginpb.NewStorageClient(link),
		front:   pluginpb.NewFrontendClient(link),
		fds:     fds,
		lost:    make(chan struct{}),
		exited:  make(chan struct{}),
		cleaned: make(chan struct{}),
	}
}

// Info returns the plugin's description of itself.
func (p *Process) Info() Info { return p.info }

// PID is the process id; the host's own for a plugin in process.
func (p *Process) PID() int {
	if p.child == nil {
		return os.Getpid()
	}
	return p.child.pid()
}

// Executable is the path it was started from.
func (p *Process) Executable() string { return p.c.Path }

// Confined returns what holds for the process; nil if it is not confined.
func (p *Process) Confined() *confine.Report { return p.confined }

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Reaped is closed when no thread of the process runs any more: none of them
// touches memory that it shares with the host. I/O that the kernel still runs
// for it may do so.
func (p *Process) Reaped() <-chan struct{} { return p.reaped() }

// ExitError is why it ended; nil while it runs and after an orderly Stop.
func (p *Process) ExitError() error {
	select {
	case <-p.exited:
		return p.exitErr
	default:
		return nil
	}
}

// supervise waits for the end of the process. The end of file of the control
// socket usually comes first.
func (p *Process) supervise() {
	var once sync.Once
	lose := func() { once.Do(func() { close(p.lost) }) }
	go func() {
		p.fds.waitEnd()
		lose()
	}()
	if p.child != nil {
		end, stop := mainThreadEnd(p.PID())
		defer stop()
		go func() {
			select {
			case <-end:
				lose()
			case <-p.exited:
			}
		}()
	}
	reaped := p.reaped()
	select {
	case <-reaped:
	case <-p.lost:
		p.onLost(reaped)
	}
	p.exitErr = p.verdict(reaped)
	p.fds.close()
	close(p.exited)
	p.report()
	p.cleanup()
	close(p.cleaned)
}

// reaped is closed when the exit status is known.
func (p *Process) reaped() <-chan struct{} {
	if p.child == nil {
		return p.lost
	}
	return p.child.ended
}

// onLost follows the end of file. A process that let go of the socket but
// lives is beyond control: it is killed. A process that takes long to be
// reaped (writes in flight) is reported before.
func (p *Process) onLost(reaped <-chan struct{}) {
	if p.stopping.Load() {
		<-reaped // Stop watches the time
		return
	}
	select {
	case <-reaped:
		return
	case <-time.After(p.c.reapGrace):
	}
	if p.child != nil {
		_ = p.child.kill()
	}
	select {
	case <-reaped:
	case <-time.After(p.c.reapGrace):
	}
}

// reapGrace is how long the report of a death waits for the exit status.
const reapGrace = 4 * time.Millisecond

func (p *Process) verdict(reaped <-chan struct{}) error {
	how := "its main thread or control socket has ended, not reaped yet"
	select {
	case <-reaped:
		if p.child == nil {
			if p.stopping.Load() && !p.killed.Load() {
				return nil
			}
			how = "killed in process"
			break
		}
		if p.child.status == nil && p.stopping.Load() {
			return nil
		}
		how = exitStatus(p.child.status)
	default:
	}
	if p.killed.Load() {
		how += ", killed by its host"
	}
	err := &exitError{text: fmt.Sprintf("%s %q (%s, pid %d): %v: %s", p.c.Kind, p.c.Name, p.c.Path, p.PID(), ErrExited, how)}
	if p.child != nil {
		p.child.hearOut(p.c.reapGrace)
		err.words = p.child.words
	}
	return err
}

// exitError quotes the last lines of stderr. They may still be on their way
// when the death is reported.
type exitError struct {
	text  string
	words *lastWords
}

func (e *exitError) Error() string { return e.text + e.words.String() }
func (e *exitError) Unwrap() error { return ErrExited }

func (p *Process) report() {
	if p.quietly.Load() {
		return
	}
	if p.exitErr != nil {
		p.c.Logger.Error("plugin ended", "plugin", p.c.Name, "pid", p.PID(), "err", p.exitErr)
	} else {
		p.c.Logger.Info("plugin stopped", "plugin", p.c.Name, "pid", p.PID())
	}
	if p.c.OnExit != nil {
		go p.c.OnExit(p.exitErr)
	}
}

// Kill ends the process at once. Requests in flight may still reach the disk;
// Exited reports the end of the process, the fence the end of its I/O.
func (p *Process) Kill() {
	p.killed.Store(true)
	if p.child == nil {
		p.kill()
		return
	}
	_ = p.child.kill()
}

// Drain waits until nothing is in flight in the plugin. The host has stopped
// submitting before: a front end submits itself, so remove its devices first.
func (p *Process) Drain(ctx context.Context) error {
	_, err := p.plugin.Drain(ctx, &pluginpb.DrainRequest{})
	return p.failed("drain", err)
}

// Stop ends the plugin in order: drain, detach, end of file, wait. When ctx
// ends before that, it is killed, and the error says so.
func (p *Process) Stop(ctx context.Context) error {
	p.stopping.Store(true)
	err := p.Drain(ctx)
	if err == nil {
		_, err = p.plugin.Detach(ctx, &pluginpb.DetachRequest{})
		err = p.failed("detach", err)
	}
	if err == nil {
		p.fds.close() // end of file for the plugin
		select {
		case <-p.exited:
		case <-ctx.Done():
			err = fmt.Errorf("stop %q: did not end: %w", p.c.Name, context.Cause(ctx))
		}
	}
	if err != nil {
		p.Kill()
		select {
		case <-p.exited:
		case <-time.After(killGrace):
			return fmt.Errorf("%w; it is killed, and its I/O keeps it", err)
		}
	}
	select {
	case <-p.cleaned:
	case <-time.After(stopGrace): // its I/O keeps it; there is nothing to wait for
	}
	return err
}

const (
	// stopGrace bounds the wait for the remains of a process.
	stopGrace = 2 * time.Second
	// killGrace bounds the wait for a killed process that cannot be reaped: its disk
	// may never answer.
	killGrace = 5 * time.Second
)

// failed wraps the error of a call.
func (p *Process) failed(what string, err error) error {
	if err == nil {
		return nil
	}
	code := status.Code(err)
	err = decodeError(err)
	if (code == codes.Unavailable || code == codes.Canceled) && p.gone(code == codes.Unavailable) {
		err = fmt.Errorf("%w: %w", ErrExited, blk.EIO)
	}
	return fmt.Errorf("%s: %s %q: %w", what, p.c.Kind, p.c.Name, err)
}

// gone also notices a death that supervise has not settled yet. gRPC may see it
// first: then it waits a little.
func (p *Process) gone(unreachable bool) bool {
	if unreachable {
		select {
		case <-p.lost:
		case <-p.exited:
		case <-time.After(goneGrace):
		}
	}
	select {
	case <-p.lost:
		return true
	case <-p.exited:
		return true
	default:
		return false
	}
}

const goneGrace = 2 * time.Second

// AttachQueue gives the plugin its end of a ring; Serve starts for it. The
// ring stays the caller's.
func (p *Process) AttachQueue(ctx context.Context, pump int, ring *shm.Ring) error {
	token, err := p.sendRing(ring)
	if err == nil {
		_, err = p.plugin.AttachQueue(ctx, &pluginpb.AttachQueueRequest{Token: token, Pump: uint32(pump)})
	}
	return p.failed(fmt.Sprintf("attach queue %d", pump), err)
}

func (p *Process) sendRing(ring *shm.Ring) (uint64, error) {
	mem, sq, cq := ring.FDs()
	if mem >= 0 {
		return p.fds.send(mem, sq, cq)
	}
	if p.handOver == nil {
		return 0, fmt.Errorf("ring is heap memory of this process: %w", blk.EINVAL)
	}
	peer, err := ring.Peer()
	if err != nil {
		return 0, err
	}
	token := p.fds.skip()
	p.handOver(token, peer)
	return token, nil
}

// AttachArena shows the plugin an arena under the id that ring entries will
// carry. The arena stays the caller's.
func (p *Process) AttachArena(ctx context.Context, id uint32, a *shm.Arena) error {
	token, err := p.fds.send(a.FD())
	if err == nil {
		_, err = p.plugin.AttachArena(ctx, &pluginpb.AttachArenaRequest{Token: token, Id: id, Size: uint64(a.Size())})
	}
	return p.failed(fmt.Sprintf("attach arena %d", id), err)
}

// DetachArena returns when the plugin no longer touches the arena.
func (p *Process) DetachArena(ctx context.Context, id uint32) error {
	_, err := p.plugin.DetachArena(ctx, &pluginpb.DetachArenaRequest{Id: id})
	return p.failed(fmt.Sprintf("detach arena %d", id), err)
}
