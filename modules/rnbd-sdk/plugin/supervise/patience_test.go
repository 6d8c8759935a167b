package supervise

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// With patience a first start that fails, or does not end, is tried again like later
// ones, and Start does not wait for that.
func TestPatience_FirstStart(t *testing.T) {
	for name, first := range map[string]func() (*fake, error){
		"fails":     func() (*fake, error) { return nil, errors.New("no such luck") },
		"is silent": func() (*fake, error) { time.Sleep(startTimeout); return nil, errors.New("no handshake") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, func(r *rig, c *Config) {
					c.Patience = 5 * time.Second
					r.launch = func(n int) (*fake, error) {
						if n < 4 {
							return first()
						}
						return newFake(), nil
					}
				})
				r.start()
				if waited := time.Since(r.begun); waited > 5*time.Second {
					t.Errorf("Start took %v", waited)
				}
				if _, err := r.Current(); !errors.Is(err, syscall.EBUSY) {
					t.Errorf("meanwhile: %v", err)
				}
				time.Sleep(startTimeout + 10*time.Millisecond)
				if name == "is silent" {
					if st := r.Status(); !strings.HasPrefix(st.String(), "failed: does not start: no handshake") {
						t.Errorf("the state is %q", st)
					}
				}
				in, err := r.Await(t.Context())
				if err != nil || in.Generation != 4 {
					t.Fatalf("%+v, %v", in, err)
				}
				if st := r.Status(); st.Restarts != 0 || st.String() != "running" || r.Info().Name != "fake" {
					t.Errorf("status %+v, info %+v", st, r.Info())
				}
				r.stop()
				r.want("joined, left")
			})
		})
	}
}

// A plugin that never fits is the error of Start, and nothing is tried again. One that
// says so after Start has returned is tried again.
func TestPatience_Misfit(t *testing.T) {
	for _, slow := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, func(r *rig, c *Config) {
				c.Patience = 5 * time.Second
				r.launch = func(int) (*fake, error) {
					if slow {
						time.Sleep(10 * time.Second)
					}
					return nil, plugin.ErrIncompatible
				}
			})
			err := r.Start(t.Context())
			time.Sleep(time.Minute)
			switch {
			case slow && (err != nil || len(r.started()) < 3):
				t.Errorf("slow: %v, %d starts", err, len(r.started()))
			case !slow && (!errors.Is(err, plugin.ErrIncompatible) || len(r.started()) != 1 || r.State() != Stopped):
				t.Errorf("%v, %d starts, %v", err, len(r.started()), r.State())
			}
			if slow {
				r.stop()
			}
		})
	}
}

// The end of the caller's context ends the first start, and the supervisor.
func TestPatience_CallerGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig, c *Config) {
			c.Patience = time.Hour
			r.launch = func(int) (*fake, error) { time.Sleep(time.Minute); return newFake(), nil }
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := r.Start(ctx); err == nil || time.Since(r.begun) > 10*time.Second || r.State() != Stopped {
			t.Errorf("%v after %v, %v", err, time.Since(r.begun), r.State())
		}
		time.Sleep(2 * time.Minute) // the process that came late is killed
	})
}
