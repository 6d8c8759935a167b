package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/handover"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
)

// An upgrade, from the side of the running process. The other side is in
// daemon_takeover.go.

// program is the path that this process was started from. The file there may be
// another one by now.
var program, errProgram = os.Executable()

// readyTime is for the next process to start, with its plugins, where the command
// names no other.
const readyTime = time.Minute

// handedOver is what a daemon hands over.
type handedOver interface {
	// sockets returns duplicates of the sockets, for the next process and for
	// resume. They are the caller's.
	sockets() ([]handover.Socket, error)
	// leave makes users wait and ends the service. devices is the number of those
	// whose users wait. With left set resume must follow if no other process serves.
	leave(ctx context.Context) (devices int, left bool, err error)
	// serveTime bounds the wait for the next process to serve.
	serveTime() time.Duration
	// pass gives the next process the devices and users that have been left. It comes
	// before the word to serve.
	pass(next *handover.Process) error
	// commit tells the next process that nothing is taken back.
	commit(next *handover.Process, r *controlpb.UpgradeReply) error
	// resume serves again. An error that is partly is no end of the daemon.
	resume(sockets []handover.Socket) error
	// end ends the upgrade, successful or not.
	end()
}

// partly is the error of a daemon that serves again, but less than before.
type partly struct{ error }

func (e partly) Unwrap() error { return e.error }

// upgrading is the part of a daemon that hands over.
type upgrading struct {
	run *daemonRun
	// protection returns that of this process. It follows the configuration.
	protection func() protection
	mu         sync.Mutex // held during an upgrade
	next       atomic.Pointer[handover.Process]
	fate       atomic.Int32  // undecided, calledOff or passedOn
	replaced   chan struct{} // closed when another process serves
	broken     chan error    // has the reason why neither process serves
}

// The end of this process and the first sign of life of the next one may meet: the
// earlier of them decides.
const (
	undecided = iota
	calledOff // this process ends, and the next one with it
	passedOn  // the next process serves, and stays
)

var errCalledOff = fmt.Errorf("this process ends: %w", syscall.ECANCELED)

func newUpgrading(r *daemonRun) *upgrading {
	return &upgrading{run: r, replaced: make(chan struct{}), broken: make(chan error, 1)}
}

// errFirstProcess is that of an upgrade of process 1: its end would be the end of its
// container, with the next process.
var errFirstProcess = fmt.Errorf("this daemon is process 1 of its container, which ends with it: "+
	"run the container with an init process (podman run --init), or start a container of the new image: %w", syscall.EOPNOTSUPP)

// isReplaced reports whether another process serves.
func (u *upgrading) isReplaced() bool {
	select {
	case <-u.replaced:
		return true
	default:
		return false
	}
}

// end ends the upgrade under way, with its process unless that serves already, and
// prevents further ones: this process ends.
func (u *upgrading) end() {
	if u.fate.CompareAndSwap(undecided, calledOff) {
		if p := u.next.Load(); p != nil {
			p.Kill()
		}
	}
	u.mu.Lock()
}

// upgrade starts a program, by default the one at the path of this one, as the next
// process of the daemon, and hands over to it. On an error this process serves as
// before.
func (u *upgrading) upgrade(r *controlpb.UpgradeRequest, s handedOver) (*controlpb.UpgradeReply, error) {
	if os.Getpid() == 1 {
		return nil, errFirstProcess
	}
	if !u.mu.TryLock() {
		return nil, fmt.Errorf("an upgrade is under way: %w", syscall.EBUSY)
	}
	defer u.mu.Unlock()
	if u.isReplaced() {
		return nil, fmt.Errorf("another process serves already, and this one ends: %w", syscall.EBUSY)
	}
	defer s.end()
	next, sockets, err := u.start(r.Binary, s)
	if err != nil {
		return nil, fmt.Errorf("upgrade: %w", err)
	}
	defer closeSockets(sockets)
	if u.next.Store(next); u.fate.Load() == calledOff {
		next.Kill()
		return nil, u.failed(errCalledOff)
	}
	// Nothing of this depends on the caller, who may go.
	patience := readyTime
	if r.ReadyUs > 0 {
		patience = time.Duration(r.ReadyUs) * time.Microsecond
	}
	ready, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	version, err := next.Ready(ready)
	if err != nil {
		next.Kill()
		return nil, u.failed(fmt.Errorf("%w; this process goes on", err))
	}
	reply, err := u.handOver(next, s, sockets)
	if err != nil {
		return nil, u.failed(err)
	}
	reply.Version = version
	u.run.log.Info("another process serves, this one ends", "pid", reply.Pid, "version", version, "took", time.Duration(reply.PauseUs)*time.Microsecond)
	u.run.manager.MainProcess(next.PID())
	close(u.replaced)
	return reply, nil
}

// failed records an upgrade that changed nothing.
func (u *upgrading) failed(err error) error {
	u.run.log.Error("the upgrade has failed", "err", err)
	u.run.journal.Add(journal.Event{Kind: journal.Daemon, To: "upgrade failed", Why: err.Error()})
	return fmt.Errorf("upgrade: %w", err)
}

// start starts the next process.
func (u *upgrading) start(binary string, s handedOver) (*handover.Process, []handover.Socket, error) {
	if binary == "" {
		if errProgram != nil {
			return nil, nil, fmt.Errorf("the path of this program is not known, name one by --binary: %w", errProgram)
		}
		binary = program
	}
	if !filepath.IsAbs(binary) {
		return nil, nil, fmt.Errorf("program %q: write an absolute path: %w", binary, syscall.EINVAL)
	}
	sockets, err := s.sockets()
	if err == nil {
		sockets, err = u.addControl(sockets)
	}
	if err != nil {
		closeSockets(sockets)
		return nil, nil, err
	}
	env := append(os.Environ(), u.run.manager.Environment()...)
	protects, err := json.Marshal(u.protection())
	if err != nil {
		closeSockets(sockets)
		return nil, nil, err
	}
	env = append(env, envProtection+"="+string(protects))
	next, err := handover.Start(binary, os.Args[1:], env, sockets)
	if err != nil {
		closeSockets(sockets)
		return nil, nil, err
	}
	u.run.log.Info("the next process is started", "path", binary, "pid", next.PID())
	return next, sockets, nil
}

// Names of the control socket: made by the daemon, or by the service manager.
const (
	socketOwn  = "control"
	socketKept = "control-kept"
)

func (u *upgrading) addControl(sockets []handover.Socket) ([]handover.Socket, error) {
	f, own, err := control.Duplicate(u.run.sock)
	if err != nil {
		return sockets, err
	}
	name := socketKept
	if own {
		name = socketOwn
	}
	return append(sockets, handover.Socket{Name: name, File: f}), nil
}

// handOver has next go on, or takes over again.
func (u *upgrading) handOver(next *handover.Process, s handedOver, sockets []handover.Socket) (*controlpb.UpgradeReply, error) {
	begin := time.Now()
	devices, left, err := s.leave(context.Background())
	if err == nil {
		err = s.pass(next)
	}
	if err == nil {
		err = next.Go(devices)
	}
	if err == nil {
		serving, cancel := context.WithTimeout(context.Background(), s.serveTime())
		err = next.Serving(serving)
		cancel()
	}
	if err == nil && !u.fate.CompareAndSwap(undecided, passedOn) {
		err = errCalledOff
	}
	reply := &controlpb.UpgradeReply{Pid: int32(next.PID()), Devices: int32(devices)}
	if err == nil {
		err = s.commit(next, reply)
	}
	if reply.PauseUs = time.Since(begin).Microseconds(); err == nil {
		return reply, nil
	}
	next.Kill()
	u.fate.CompareAndSwap(passedOn, undecided)
	if !left {
		return nil, fmt.Errorf("%w; this process goes on", err)
	}
	again := s.resume(sockets)
	if errors.As(again, &partly{}) {
		return nil, fmt.Errorf("%w; this process serves again: %w", err, again)
	}
	if again != nil {
		u.broken <- fmt.Errorf("after a failed upgrade (%w) the daemon does not serve again: %w", err, again)
		return nil, errors.Join(err, again)
	}
	return nil, fmt.Errorf("%w; this process serves again", err)
}

func closeSockets(all []handover.Socket) {
	for _, s := range all {
		s.File.Close()
	}
}

// socketOf returns the file of a socket, once; nil if there is none. It is a
// function of the names that are left.
func socketOf(all []handover.Socket) func(name string) *os.File {
	left := slices.Clone(all)
	return func(name string) *os.File {
		i := slices.IndexFunc(left, func(s handover.Socket) bool { return s.Name == name })
		if i < 0 {
			return nil
		}
		f := left[i].File
		left = slices.Delete(left, i, i+1)
		return f
	}
}

// listenName is the name of the socket for an argument of --listen.
func listenName(arg string) string { return "listen " + strings.TrimSpace(arg) }
