package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// leaving is a client with a disk, and the arguments of its next process.
type leaving struct {
	t     *testing.T
	s     *target
	c     *Client
	d     *Device
	dir   frontDir
	state string
	use   func(*Config)
}

func newLeaving(t *testing.T) *leaving {
	t.Helper()
	l := &leaving{t: t, s: newTarget(t, 1<<20), dir: newFrontDir(t)}
	name, use := withState(t)
	l.state, l.use = name, func(cfg *Config) {
		withTestFront(t)(cfg)
		use(cfg)
	}
	l.c = l.s.newClient(l.use)
	var err error
	l.d, err = l.s.mapIn(l.c, "vol", l.dir)
	must(t, err)
	return l
}

func (l *leaving) handOver() *Handover {
	l.t.Helper()
	h, err := l.c.HandOver(l.t.Context())
	must(l.t, err)
	return h
}

// next is the client of the next process, which has h as it travels.
func (l *leaving) next(h *Handover) (*Client, *Handover) {
	l.t.Helper()
	state, err := h.State()
	must(l.t, err)
	if bytes.ContainsRune(state, '\n') {
		l.t.Error("the state has several lines")
	}
	parsed, err := ParseHandover(state, h.Connections())
	must(l.t, err)
	return l.s.newClient(l.use, func(cfg *Config) { cfg.Standby = true }), parsed
}

func (l *leaving) takeOver(c *Client, h *Handover) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(l.t.Context(), 20*time.Second)
	defer cancel()
	must(l.t, c.TakeOver(ctx, h))
}

func (l *leaving) file() []byte {
	l.t.Helper()
	b, err := os.ReadFile(l.state)
	must(l.t, err)
	return b
}

// The next client maps a device under its name, and the disk is the same. The state
// file belongs to one client at a time, and always has the disk.
func TestHandOver_ToTheNextClient(t *testing.T) {
	l := newLeaving(t)
	before := l.file()
	h := l.handOver()
	eventually(t, "the session is closed", func() bool { return l.s.sessions.Load() == 0 })
	if h.Devices != 1 || len(l.c.Devices()) != 0 {
		t.Fatalf("%d devices are handed over, %d are left", h.Devices, len(l.c.Devices()))
	}
	for what, err := range map[string]error{
		"map":       func() error { _, err := l.s.mapIn(l.c, "other", l.dir); return err }(),
		"unmap":     l.c.Unmap(t.Context(), "rnbd0", true),
		"hand-over": func() error { _, err := l.c.HandOver(t.Context()); return err }(),
	} {
		if !errors.Is(err, errAway) || !errors.Is(err, syscall.EBUSY) {
			t.Errorf("%s meanwhile: %v, want %v", what, err, errAway)
		}
	}
	l.c.sessionChanged()
	if !bytes.Equal(l.file(), before) {
		t.Errorf("the state file has changed:\n%s\n%s", before, l.file())
	}
	next, parsed := l.next(h)
	next.sessionChanged()
	l.takeOver(next, parsed)
	if !bytes.Equal(l.file(), before) {
		t.Errorf("the state file has changed before the next client serves:\n%s", l.file())
	}
	next.ServeUsers(t.Context())
	l.c.HandedOver()
	must(t, l.c.Close(t.Context()))
	d, err := next.Device("rnbd0")
	must(t, err)
	if d.identity != l.d.identity || d.Location() != l.d.Location() || d.State() != Open {
		t.Errorf("device %q at %q, %v", d.identity, d.Location(), d.State())
	}
	if told := l.dir.told(); slices.ContainsFunc(told, func(s string) bool { return strings.HasPrefix(s, "remove") }) {
		t.Errorf("the disk was taken away: %q", told)
	}
	saved := load(t, l.state)
	if len(saved.Devices) != 1 || saved.Devices[0].Identity != d.identity || saved.Devices[0].Location != d.Location() {
		t.Errorf("state file: %+v", saved)
	}
	must(t, next.Unmap(t.Context(), "rnbd0", false))
}

// A client that has left takes its devices back, and may leave again.
func TestHandOver_TakenBack(t *testing.T) {
	l := newLeaving(t)
	for range 2 {
		h := l.handOver()
		l.takeOver(l.c, h)
		l.c.ServeUsers(t.Context())
		d, err := l.c.Device("rnbd0")
		must(t, err)
		if d.identity != l.d.identity || d.State() != Open {
			t.Errorf("device %q, %v", d.identity, d.State())
		}
		if saved := load(t, l.state); len(saved.Devices) != 1 {
			t.Errorf("state file: %+v", saved)
		}
	}
	must(t, l.c.Unmap(t.Context(), "rnbd0", false))
	_, err := l.s.mapIn(l.c, "other", l.dir)
	must(t, err)
}

// A disk whose server is away waits for it in the next client.
func TestHandOver_DiskWithoutAServer(t *testing.T) {
	l := newLeaving(t)
	l.s.kill()
	eventually(t, "closed", func() bool { return l.d.State() == Closed })
	h := l.handOver()
	if h.Devices != 0 || len(h.state.Waiting) != 1 {
		t.Fatalf("%+v", h.state)
	}
	next, parsed := l.next(h)
	l.takeOver(next, parsed)
	next.ServeUsers(t.Context())
	if saved := load(t, l.state); len(saved.Devices) != 1 {
		t.Errorf("state file: %+v", saved)
	}
	l.s.start()
	eventually(t, "the disk is served", func() bool {
		d, err := next.Device("rnbd0")
		return err == nil && d.State() == Open
	})
}

// A device that the next client does not get is an error there, and so is a state that
// it does not understand.
func TestHandOver_Fails(t *testing.T) {
	l := newLeaving(t)
	h := l.handOver()
	next, parsed := l.next(h)
	l.s.set(func() { l.s.openErr = blk.EROFS })
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := next.TakeOver(ctx, parsed); err == nil {
		t.Error("no error")
	}
	l.s.set(func() { l.s.openErr = blk.OK })
	for text, want := range map[string]string{"": "unexpected end", `{"version":9}`: "restart the daemon", "[]": "cannot unmarshal"} {
		if _, err := ParseHandover([]byte(text), nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// While a device is being mapped a client does not leave.
func TestHandOver_NotDuringAMap(t *testing.T) {
	l := newLeaving(t)
	dir := newFrontDir(t)
	must(t, dir.set("hold", ""))
	mapped := async(func() error { _, err := l.s.mapIn(l.c, "other", dir); return err })
	eventually(t, "the front end has it", func() bool { return len(dir.told()[0]) > 0 })
	if h, err := l.c.HandOver(t.Context()); h != nil || !errors.Is(err, syscall.EBUSY) {
		t.Errorf("%v, %v", h, err)
	}
	must(t, dir.remove("hold"))
	must(t, soon(t, "the map ends", mapped))
	l.takeOver(l.c, l.handOver())
	l.c.ServeUsers(t.Context())
}

// closeable is a fabric whose Close is noticed.
type closeable struct {
	verbs.Device
	closed *atomic.Bool
}

func (c closeable) Close() error { c.closed.Store(true); return nil }

// newClosing is newLeaving with a fabric that a hand-over closes. closed reports whether
// it is closed.
func newClosing(t *testing.T) (l *leaving, closed *atomic.Bool) {
	t.Helper()
	closed = &atomic.Bool{}
	l = &leaving{t: t, s: newTarget(t, 1<<20), dir: newFrontDir(t)}
	_, use := withState(t)
	l.c = l.s.newClient(withTestFront(t), use, func(cfg *Config) {
		dev := cfg.Fabrics["loopback"]
		cfg.Fabrics["loopback"] = closeable{dev, closed}
		cfg.Reopen = map[string]func() (verbs.Device, error){"loopback": func() (verbs.Device, error) {
			closed.Store(false)
			return closeable{dev, closed}, nil
		}}
	})
	var err error
	l.d, err = l.s.mapIn(l.c, "vol", l.dir)
	must(t, err)
	return l, closed
}

// awaitReconnected takes all paths away, and waits until the device is open again.
func (l *leaving) awaitReconnected() {
	l.t.Helper()
	l.s.kill()
	eventually(l.t, "the device notices that the server is gone", func() bool {
		d, err := l.c.Device("rnbd0")
		return err == nil && d.State() != Open
	})
	l.s.start()
	eventually(l.t, "the device is open again", func() bool {
		d, err := l.c.Device("rnbd0")
		return err == nil && d.State() == Open
	})
}

// A hand-over stops at the first step that fails: a fabric that sessions use stays open,
// and the client reconnects after the next loss of all paths.
func TestHandOver_StepFails(t *testing.T) {
	for name, fail := range map[string]func(*leaving) (undo func()){
		"requests in flight": func(l *leaving) func() {
			l.d.shares[0].inflight.Add(1)
			return func() { l.d.shares[0].inflight.Add(-1) }
		},
		"no descriptors are left": func(l *leaving) func() {
			var was unix.Rlimit
			must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &was))
			open, err := os.ReadDir("/proc/self/fd")
			must(t, err)
			must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(len(open) + 4), Max: was.Max}))
			return func() { must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &was)) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			l, closed := newClosing(t)
			undo := fail(l)
			h, err := l.c.HandOver(t.Context())
			undo()
			t.Log(err)
			if err == nil {
				t.Fatal("no error")
			}
			if closed.Load() {
				t.Error("the fabric is closed")
			}
			if h != nil {
				l.takeOver(l.c, h)
				l.c.ServeUsers(t.Context())
			}
			l.awaitReconnected()
			l.takeOver(l.c, l.handOver()) // and all steps work
			l.c.ServeUsers(t.Context())
			l.awaitReconnected()
		})
	}
}

// Whichever step of a hand-over fails, before it has done anything or after it has done
// all, the client serves all devices again with their disks, survives the loss of all
// paths, and may leave after that.
func TestHandOver_EachStepFails(t *testing.T) {
	for i, step := range newDeparture(nil).steps {
		for _, done := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, done %t", step.name, done), func(t *testing.T) {
				t.Parallel()
				l, _ := newClosing(t)
				other, err := l.s.mapIn(l.c, "other", newFrontDir(t))
				must(t, err)
				p := newDeparture(l.c)
				do := p.steps[i].do
				p.steps[i].do = func(ctx context.Context) error {
					if done {
						if err := do(ctx); err != nil {
							return err
						}
					}
					return syscall.EDEADLK
				}
				h, err := p.run(t.Context())
				if !errors.Is(err, syscall.EDEADLK) {
					t.Fatal(err)
				}
				if h != nil {
					l.takeOver(l.c, h)
					l.c.ServeUsers(t.Context())
				}
				l.awaitReconnected()
				for name, was := range map[string]*Device{"rnbd0": l.d, other.name: other} {
					eventually(t, name+" serves", func() bool {
						d, err := l.c.Device(name)
						if err != nil || d.State() != Open || d.identity != was.identity || d.Location() != was.Location() {
							return false
						}
						proc, err := l.c.frontends[0].process()
						return err == nil && knows(t.Context(), proc, d)
					})
				}
				if told := l.dir.told(); slices.ContainsFunc(told, func(s string) bool { return strings.HasPrefix(s, "remove") }) {
					t.Errorf("the disk was taken away: %q", told)
				}
				l.takeOver(l.c, l.handOver())
				l.c.ServeUsers(t.Context())
				l.awaitReconnected()
			})
		}
	}
}
