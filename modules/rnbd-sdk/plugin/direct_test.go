package plugin

import (
	"context"
	"errors"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// napper is memory with a Serve that waits on a timer, as a simulation must. It
// answers after 10 ms.
type napper struct{ *memory }

func (n napper) Serve(q *Queue) error {
	var batch [8]Request
	for ; !q.Closed(); time.Sleep(time.Millisecond) {
		k := q.Next(batch[:])
		if k > 0 {
			time.Sleep(10 * time.Millisecond)
		}
		for _, r := range batch[:k] {
			q.Complete(r.Tag, blk.OK)
		}
		q.Publish()
	}
	return nil
}

func directT(t *testing.T, author any, onExit func(error)) *Process {
	t.Helper()
	p, err := LaunchDirect(t.Context(), Config{Kind: KindIO, Name: "direct", Logger: self(t, "x").Logger, OnExit: onExit}, author)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestLaunchDirect_ServesInVirtualTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := directT(t, napper{newMemory()}, nil)
		r := attachT(t, p)
		defer r.close()
		if _, err := p.OpenDisk(t.Context(), OpenRequest{Device: 1, Name: "a"}); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		r.submit(shm.SQE{Tag: 7, Op: blk.Read, Device: 1, Arena: rigArena, Len: 4096})
		if c := r.answer(); c.Tag != 7 || c.Errno != 0 {
			t.Errorf("answer %+v", c)
		}
		if d := time.Since(start); d < 10*time.Millisecond || d > 20*time.Millisecond {
			t.Errorf("it took %v of virtual time", d)
		}
		_, err := p.OpenDisk(t.Context(), OpenRequest{Device: 1, Name: "a"})
		if !errors.Is(err, syscall.EEXIST) {
			t.Errorf("a second open at one index: %v", err)
		}
		if err := p.Stop(t.Context()); err != nil {
			t.Errorf("stop: %v", err)
		}
	})
}

func TestLaunchDirect_KillEndsCallsAndProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		exited := make(chan error, 1)
		b := newMemory()
		p := directT(t, napper{b}, func(err error) { exited <- err })
		r := attachT(t, p)
		defer r.close()
		if _, err := p.OpenDisk(t.Context(), OpenRequest{Device: 1, Name: "a"}); err != nil {
			t.Fatal(err)
		}
		r.submit(shm.SQE{Op: blk.Read, Device: 1, Arena: rigArena, Len: 4096})
		time.Sleep(5 * time.Millisecond)
		closing := make(chan error, 1)
		go func() { closing <- p.CloseDisk(context.Background(), 1) }()
		time.Sleep(time.Millisecond)
		p.Kill()
		if err := <-closing; !errors.Is(err, ErrExited) {
			t.Errorf("a call under way ended with %v", err)
		}
		if err := <-exited; !errors.Is(err, ErrExited) {
			t.Errorf("OnExit was told %v", err)
		}
		<-p.cleaned
	})
}
