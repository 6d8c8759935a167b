package pump

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// virtualPump is a running one. Stop it before the bubble ends.
func virtualPump(t *testing.T, name string) *Pump {
	t.Helper()
	p, err := New(Config{Name: name, Virtual: true})
	if err != nil {
		t.Fatal(err)
	}
	p.Start()
	return p
}

func TestVirtual_RequestsTravelInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := virtualPump(t, "near"), virtualPump(t, "far")
		defer near.Stop()
		defer far.Stop()
		r, err := shm.NewHeapRing(8)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		c := &client{Submitter: r.Submitter()}
		add(t, near, c)
		add(t, far, &echo{Completer: r.Completer()})
		time.Sleep(time.Hour) // both nap as long as they may
		start := time.Now()
		near.Call(func() { c.Push(&shm.SQE{}); c.Publish() })
		for answered := 0; answered == 0; time.Sleep(firstNap) {
			near.Call(func() { answered = c.answered })
		}
		if d := time.Since(start); d > 3*maxNap {
			t.Errorf("an idle pump's answer took %v of virtual time", d)
		}
	})
}

func TestVirtual_FunctionsRunAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := virtualPump(t, "p")
		time.Sleep(time.Second)
		start := time.Now()
		p.Call(func() {})
		if d := time.Since(start); d != 0 {
			t.Errorf("Call took %v of virtual time", d)
		}
		if p.TryDrive(func() {}) || p.Drive(func() {}) {
			t.Error("a virtual pump lets itself be driven")
		}
		p.Stop()
		p.Do(func() {})
	})
}
