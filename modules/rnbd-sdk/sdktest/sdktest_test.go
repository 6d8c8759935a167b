package sdktest

import (
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		if !Holds(time.Second, func() bool { calls++; return calls == 20 }) {
			t.Error("a condition that comes true is not seen")
		}
		begin := time.Now()
		if Holds(time.Second, func() bool { return false }) {
			t.Error("a condition that never comes true is seen")
		}
		if took := time.Since(begin); took < time.Second || took > 1100*time.Millisecond {
			t.Errorf("the wait of a second took %v", took)
		}
	})
}

// recorder is a test with a recorded end.
type recorder struct {
	testing.TB
	failed, ended bool
	said          string
}

func (r *recorder) Helper()      {}
func (r *recorder) Failed() bool { return r.failed }
func (r *recorder) FailNow()     { r.failed, r.ended = true, true; runtime.Goexit() }
func (r *recorder) Fatalf(format string, args ...any) {
	r.said = format + args[1].(string)
	r.FailNow()
}

func TestWithin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, c := range []struct {
			name   string
			failed bool // before the wait
			ok     bool
			ends   bool
			says   string
		}{
			{name: "the condition holds", ok: true},
			{name: "it never holds", ends: true, says: "lunch"},
			{name: "the test has failed", failed: true, ends: true},
		} {
			r := &recorder{TB: t, failed: c.failed}
			done := make(chan struct{})
			go func() {
				defer close(done)
				Eventually(r, "lunch", func() bool { return c.ok })
			}()
			<-done
			if r.ended != c.ends || !strings.HasSuffix(r.said, c.says) || c.says == "" && r.said != "" {
				t.Errorf("%s: ended %v, said %q", c.name, r.ended, r.said)
			}
		}
	})
}
