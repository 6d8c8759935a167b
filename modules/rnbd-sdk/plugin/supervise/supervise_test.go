package supervise

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// fake is a process that a test scripts.
type fake struct {
	Process // nil: other methods must not be called
	exited  chan struct{}
	once    sync.Once
	err     error
	hang    bool // neither Stop nor Kill ends it
	slow    bool // Stop takes a second
	attach  error
}

func newFake() *fake { return &fake{exited: make(chan struct{})} }

func (f *fake) Info() plugin.Info       { return plugin.Info{Name: "fake"} }
func (f *fake) PID() int                { return 4711 }
func (f *fake) Exited() <-chan struct{} { return f.exited }

func (f *fake) ExitError() error {
	select {
	case <-f.exited:
		return f.err
	default:
		return nil
	}
}

func (f *fake) end(err error) { f.once.Do(func() { f.err = err; close(f.exited) }) }

func (f *fake) die() { f.end(plugin.ErrExited) }

func (f *fake) Kill() {
	if !f.hang {
		f.die()
	}
}

func (f *fake) Stop(ctx context.Context) error {
	if f.hang {
		time.Sleep(time.Hour) // as a process that is in the kernel
	}
	if f.slow {
		time.Sleep(time.Second)
	}
	if err := f.ExitError(); err != nil {
		return err
	}
	f.end(nil)
	return nil
}

func (f *fake) AttachQueue(context.Context, int, *shm.Ring) error { return f.attach }

// rig is a supervisor of fakes.
type rig struct {
	t *testing.T
	*Supervisor
	begun time.Time

	mu     sync.Mutex
	events []string
	starts []time.Duration // since begun
	procs  []*fake
	launch func(n int) (*fake, error) // nil: one that lives
	logs   strings.Builder
}

func newRig(t *testing.T, change func(*rig, *Config)) *rig {
	r := &rig{t: t, begun: time.Now()}
	c := Config{
		Plugin:  plugin.Config{Name: "p", Pumps: 2},
		NewRing: shm.NewHeapRing, Entries: 16,
		Logger: slog.New(slog.NewTextHandler(&r.logs, nil)),
		Joined: func(context.Context, *Instance) error { r.note("joined"); return nil },
		Left:   func(*Instance, error) { r.note("left") },
		GaveUp: func(error) { r.note("gave up") },
	}
	c.Launch = func(context.Context, plugin.Config) (Process, error) {
		r.mu.Lock()
		r.starts = append(r.starts, time.Since(r.begun))
		n := len(r.starts)
		r.mu.Unlock()
		f, err := newFake(), error(nil)
		if r.launch != nil {
			f, err = r.launch(n)
		}
		if err != nil {
			return nil, err
		}
		r.mu.Lock()
		r.procs = append(r.procs, f)
		r.mu.Unlock()
		return f, nil
	}
	if change != nil {
		change(r, &c)
	}
	r.Supervisor = New(c)
	return r
}

func (r *rig) note(s string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, s)
}

func (r *rig) start() {
	r.t.Helper()
	if err := r.Start(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) stop() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := r.Stop(ctx); err != nil {
		r.t.Error(err)
	}
	if s := r.State(); s != Stopped {
		r.t.Errorf("after the stop it is %v", s)
	}
}

// started is when processes were started.
func (r *rig) started() []time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.starts)
}

// crash ends the process that runs.
func (r *rig) crash() {
	r.mu.Lock()
	p := r.procs[len(r.procs)-1]
	r.mu.Unlock()
	p.die()
	synctest.Wait()
}

func (r *rig) want(events string) {
	r.t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	if got := strings.Join(r.events, ", "); got != events {
		r.t.Errorf("events: %s\nwant:   %s", got, events)
	}
}

func TestProcessDies_NextOneIsStartedAtOnceAfterLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		r.start()
		first, err := r.Current()
		if err != nil || first.Generation != 1 || len(first.Rings) != 2 {
			t.Fatalf("first: %+v, %v", first, err)
		}
		r.crash()
		r.want("joined, left, joined")
		second, err := r.Current()
		if err != nil || second.Generation != 2 || r.started()[1] != 0 {
			t.Errorf("second: %+v, %v, started at %v", second, err, r.started())
		}
		if first.Context().Err() == nil || second.Context().Err() != nil {
			t.Error("the context of a process ends with it")
		}
		if first.Rings != nil {
			t.Error("rings of the dead process are open")
		}
		st := r.Status()
		if st.Restarts != 1 || st.Crashes != 0 || st.LastError == "" || st.PID == 0 {
			t.Errorf("status: %+v", st)
		}
		r.stop()
		r.want("joined, left, joined, left")
	})
}

func TestProcessDiesBeforeItIsJoined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig, c *Config) {
			c.Joined = func(_ context.Context, in *Instance) error {
				r.note("joined")
				if in.Generation == 1 {
					in.Process.Kill()
				}
				return nil
			}
		})
		r.start()
		synctest.Wait()
		r.want("joined, left, joined")
		r.stop()
	})
}

func TestCrashLimit_GivesUpUntilReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(_ *rig, c *Config) { c.Crash = Limit{Count: 3, Window: time.Minute} })
		r.start()
		r.crash()
		time.Sleep(61 * time.Second) // that one is forgotten
		r.crash()
		r.crash()
		if s := r.State(); s != Running {
			t.Fatalf("after two crashes within a minute it is %v", s)
		}
		r.crash()
		if _, err := r.Current(); !errors.Is(err, syscall.EIO) {
			t.Errorf("given up: %v, want EIO", err)
		}
		if _, err := r.Await(t.Context()); !errors.Is(err, syscall.EIO) {
			t.Errorf("await of what is given up: %v, want EIO", err)
		}
		time.Sleep(time.Hour)
		if n := len(r.started()); n != 4 || r.State() != GivenUp {
			t.Fatalf("%d starts, %v", n, r.State())
		}
		if err := r.Reset(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Await(t.Context()); err != nil {
			t.Errorf("await after the reset: %v", err)
		}
		if in, err := r.Current(); err != nil || in.Generation != 5 {
			t.Errorf("after the reset: %v", err)
		}
		r.crash()
		r.crash()
		if s := r.State(); s != Running {
			t.Errorf("crashes before the reset count: %v", s)
		}
		r.stop()
		r.want("joined, left, joined, left, joined, left, joined, left, gave up, joined, left, joined, left, joined, left")
	})
}

func TestStartThatFails_IsTriedForEverWithGrowingPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig, c *Config) {
			c.Crash = Limit{Count: 2, Window: time.Minute}
			r.launch = func(n int) (*fake, error) {
				if n >= 2 && n < 1000 {
					return nil, errors.New("no such luck")
				}
				return newFake(), nil
			}
		})
		r.start()
		r.crash()
		if _, err := r.Current(); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("while it does not start: %v, want EBUSY", err)
		}
		time.Sleep(30 * time.Second)
		ms := time.Millisecond
		want := []time.Duration{0, 0, 100 * ms, 300 * ms, 700 * ms, 1500 * ms, 3100 * ms, 6300 * ms, 11300 * ms, 16300 * ms, 21300 * ms, 26300 * ms}
		if len(r.started()) != len(want) {
			t.Fatalf("starts at %v, want %v", r.started(), want)
		}
		for i := range want {
			if r.started()[i] != want[i] {
				t.Errorf("start %d at %v, want %v", i+1, r.started()[i], want[i])
			}
		}
		if st := r.Status(); st.State != Waiting || st.FailedStarts != 11 || st.Crashes != 1 || !strings.Contains(st.LastError, "luck") || time.Until(st.NextStart) <= 0 {
			t.Errorf("status: %+v", st)
		}
		time.Sleep(2 * time.Hour)
		if in, err := r.Current(); err != nil || in.Generation != 1000 {
			t.Errorf("after 1000 tries: %v", err)
		}
		synctest.Wait()
		if n := strings.Count(r.logs.String(), "does not start"); n > 12 {
			t.Errorf("998 failed starts are logged %d times", n)
		}
		r.stop()
	})
}

func TestReset_EndsThePause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var fails atomic.Bool
		fails.Store(true)
		r := newRig(t, func(r *rig, c *Config) {
			r.launch = func(n int) (*fake, error) {
				if n > 1 && fails.Load() {
					return nil, errors.New("not yet")
				}
				return newFake(), nil
			}
		})
		r.start()
		r.crash()
		time.Sleep(time.Minute + 500*time.Millisecond)
		fails.Store(false)
		before := time.Now()
		if err := r.Reset(); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Await(t.Context()); err != nil || time.Since(before) != 0 {
			t.Errorf("%v, after %v", err, time.Since(before))
		}
		r.stop()
	})
}

func TestDeaths_RestartsAreApart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig, c *Config) {
			c.Apart = time.Second
			r.launch = func(int) (*fake, error) {
				f := newFake()
				time.AfterFunc(10*time.Millisecond, f.die)
				return f, nil
			}
		})
		r.start()
		time.Sleep(5 * time.Second)
		want := []time.Duration{0, 10 * time.Millisecond, 1010 * time.Millisecond, 2010 * time.Millisecond, 3010 * time.Millisecond, 4010 * time.Millisecond}
		for i := range min(len(want), len(r.started())) {
			if r.started()[i] != want[i] {
				t.Errorf("start %d at %v, want %v", i+1, r.started()[i], want[i])
			}
		}
		if len(r.started()) != len(want) {
			t.Errorf("starts at %v", r.started())
		}
		r.stop()
	})
}

func TestFirstStart_ItsErrorIsTheCallers(t *testing.T) {
	bad := errors.New("bad")
	for _, c := range []struct {
		name   string
		change func(*rig, *Config)
		events string
	}{
		{"the process does not start", func(r *rig, _ *Config) {
			r.launch = func(int) (*fake, error) { return nil, bad }
		}, ""},
		{"the process does not take its rings", func(r *rig, _ *Config) {
			r.launch = func(int) (*fake, error) { f := newFake(); f.attach = bad; return f, nil }
		}, ""},
		{"its owner does not take it", func(r *rig, c *Config) {
			c.Joined = func(context.Context, *Instance) error { return bad }
		}, "left"},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, c.change)
				if err := r.Start(t.Context()); !errors.Is(err, bad) {
					t.Errorf("%v", err)
				}
				r.want(c.events)
				if s := r.State(); s != Stopped {
					t.Errorf("it is %v", s)
				}
				for _, p := range r.procs {
					if p.ExitError() == nil {
						t.Error("the process lives")
					}
				}
				r.stop()
			})
		})
	}
}

func TestJoinedFails_IsAFailedStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig, c *Config) {
			c.Crash = Limit{Count: 3, Window: time.Hour}
			c.Joined = func(_ context.Context, in *Instance) error {
				r.note("joined")
				if in.Generation > 1 && in.Generation < 5 {
					return errors.New("not mine")
				}
				return nil
			}
		})
		r.start()
		r.crash()
		time.Sleep(time.Minute)
		r.want("joined, left, joined, left, joined, left, joined, left, joined")
		r.crash() // the second one
		if r.State() != Running {
			t.Errorf("it is %v", r.State())
		}
		r.stop()
	})
}

func TestStartThatHangs_IsGivenUpAndItsProcessKilled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := newFake()
		r := newRig(t, func(r *rig, c *Config) {
			c.StartTimeout = 5 * time.Second
			r.launch = func(n int) (*fake, error) {
				if n == 2 {
					time.Sleep(time.Hour)
					return late, nil
				}
				return newFake(), nil
			}
		})
		r.start()
		r.crash()
		time.Sleep(10 * time.Second)
		if in, err := r.Current(); err != nil || in.Generation != 3 {
			t.Errorf("after a start that hangs: %v", err)
		}
		time.Sleep(time.Hour)
		if late.ExitError() == nil {
			t.Error("the process that came late lives")
		}
		r.stop()
	})
}

func TestStop_IsBoundedInEveryState(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*rig, *Config)
		crash  bool
		within time.Duration // from the call
		bad    bool          // an error is wanted
	}{
		{"while it runs", nil, false, 0, false},
		{"while its process hangs in the kernel", func(r *rig, _ *Config) {
			r.launch = func(int) (*fake, error) { f := newFake(); f.hang = true; return f, nil }
		}, false, 11 * time.Second, true},
		{"while it waits for the next start", func(r *rig, _ *Config) {
			r.launch = func(n int) (*fake, error) {
				if n > 1 {
					return nil, errors.New("not yet")
				}
				return newFake(), nil
			}
		}, true, 0, false},
		{"while a start hangs", func(r *rig, _ *Config) {
			r.launch = func(n int) (*fake, error) {
				if n > 1 {
					time.Sleep(time.Hour)
				}
				return newFake(), nil
			}
		}, true, time.Second, false},
		{"after it was given up", func(_ *rig, c *Config) { c.Crash = Limit{1, time.Hour} }, true, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, c.change)
				r.start()
				if c.crash {
					r.crash()
				}
				ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
				defer cancel()
				before := time.Now()
				if err := r.Stop(ctx); (err != nil) != c.bad {
					t.Errorf("stop: %v", err)
				}
				if d := time.Since(before); d > c.within {
					t.Errorf("stop took %v, want %v at most", d, c.within)
				}
				if _, err := r.Current(); !errors.Is(err, syscall.ECANCELED) {
					t.Errorf("after the stop: %v, want ECANCELED", err)
				}
				if err := r.Reset(); !errors.Is(err, syscall.ECANCELED) {
					t.Errorf("reset after the stop: %v, want ECANCELED", err)
				}
				r.want("joined, left" + map[bool]string{true: ", gave up"}[c.name == "after it was given up"])
				time.Sleep(2 * time.Hour) // for a call that hangs
			})
		})
	}
}

func TestStop_OfAProcessThatEndsMeanwhile(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*Instance)
		bad  bool
	}{
		{"killed by its host", func(in *Instance) { in.Kill(errors.New("it hangs")) }, false},
		{"crashed", func(in *Instance) { in.Process.(*fake).die() }, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, nil)
				r.launch = func(int) (*fake, error) { f := newFake(); f.slow = true; return f, nil }
				r.start()
				in, err := r.Current()
				if err != nil {
					t.Fatal(err)
				}
				time.AfterFunc(500*time.Millisecond, func() { c.end(in) })
				if err := r.Stop(t.Context()); (err != nil) != c.bad {
					t.Errorf("stop: %v", err)
				}
			})
		})
	}
}

func TestStop_BeforeTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		r.stop()
		if err := r.Start(t.Context()); err == nil {
			t.Error("it starts after its end")
		}
		r.stop()
	})
}

func TestNoRestart_TheProcessGoesOnUntilItsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		r.start()
		r.NoRestart()
		synctest.Wait()
		if _, err := r.Current(); err != nil {
			t.Fatal(err)
		}
		r.crash()
		if n := len(r.started()); n != 1 || r.State() != Stopped {
			t.Errorf("%d starts, %v", n, r.State())
		}
		r.want("joined, left")
		r.stop()
	})
}

func TestKill_OfAnEarlierProcessLeavesTheNextOneAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var cause error
		r := newRig(t, func(r *rig, c *Config) { c.Left = func(_ *Instance, err error) { cause = err } })
		r.start()
		first, _ := r.Current()
		broken := errors.New("ring is broken")
		first.Kill(broken)
		first.Kill(errors.New("again"))
		synctest.Wait()
		if !errors.Is(cause, broken) {
			t.Errorf("left because of %v", cause)
		}
		second, err := r.Current()
		if err != nil {
			t.Fatal(err)
		}
		first.Kill(broken)
		synctest.Wait()
		if in, _ := r.Current(); in != second {
			t.Error("the next process is killed")
		}
		r.stop()
	})
}

func TestAwait_WaitsForTheNextProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig, _ *Config) {
			r.launch = func(n int) (*fake, error) {
				if n == 2 {
					time.Sleep(3 * time.Second)
				}
				return newFake(), nil
			}
		})
		r.start()
		r.crash()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := r.Await(ctx); !errors.Is(err, context.DeadlineExceeded) || !errors.Is(err, syscall.EBUSY) {
			t.Errorf("too early: %v", err)
		}
		before := time.Now()
		if in, err := r.Await(t.Context()); err != nil || in.Generation != 2 || time.Since(before) != 2*time.Second {
			t.Errorf("%v after %v", err, time.Since(before))
		}
		r.stop()
	})
}
