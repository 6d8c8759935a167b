package plugin

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
)

// uses are calls at device 1 that may take their time.
var uses = map[string]func(context.Context, *Process) error{
	"Extents": func(ctx context.Context, p *Process) error {
		_, err := p.Extents(ctx, 1, 0, 512)
		return err
	},
	"ResizeDisk": func(ctx context.Context, p *Process) error {
		_, err := p.ResizeDisk(ctx, 1)
		return err
	},
}

// eachUse runs a test for each kind of call, with a disk whose calls wait for the gate.
func eachUse(t *testing.T, test func(t *testing.T, b *mapped, use func(context.Context, *Process) error)) {
	for name, use := range uses {
		t.Run(name, func(t *testing.T) {
			b := &mapped{memory: newMemory()}
			b.disk.list, b.disk.gate = []extents.Extent{data(512)}, make(chan struct{})
			test(t, b, use)
		})
	}
}

// begin makes a call, and returns when the disk is in it.
func begin(t *testing.T, ctx context.Context, b *mapped, call func(context.Context) error) (done chan error) {
	t.Helper()
	done = make(chan error, 1)
	go func() { done <- call(ctx) }()
	if !eventually(func() bool { return b.disk.inside.Load() == 1 }) {
		t.Fatal("the disk was not asked")
	}
	return done
}

// A disk that does not answer has one goroutine for each kind of call, however often
// it is asked, and is not closed under it.
func TestProcess_CallsThatHang(t *testing.T) {
	eachUse(t, func(t *testing.T, b *mapped, use func(context.Context, *Process) error) {
		p := startMapped(t, b)
		ctx, cancel := context.WithCancel(testContext(t))
		defer cancel()
		done := begin(t, ctx, b, func(ctx context.Context) error { return use(ctx, p) })
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Fatalf("the call that hangs: %v", err)
		}
		for range 3 {
			if err := use(testContext(t), p); blk.ToErrno(err) != blk.EBUSY {
				t.Fatalf("another one: %v, want EBUSY", err)
			}
		}
		short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		if err := p.CloseDisk(short, 1); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("close: %v", err)
		}
		if !eventually(func() bool { // the plugin has given up closing it
			return blk.ToErrno(use(testContext(t), p)) == blk.EBUSY
		}) {
			t.Error("the disk is not open any more")
		}
		if n, _ := b.disk.closes(); n != 0 || b.disk.calls.Load() != 1 {
			t.Errorf("closed %d times, asked %d times", n, b.disk.calls.Load())
		}
		close(b.disk.gate)
		for name, use := range uses {
			var err error
			if !eventually(func() bool { err = use(testContext(t), p); return err == nil }) {
				t.Errorf("%s has no answer although the disk goes on: %v", name, err)
			}
		}
		if err := p.CloseDisk(testContext(t), 1); err != nil {
			t.Error(err)
		}
		if n, early := b.disk.closes(); n != 1 || early {
			t.Errorf("closed %d times, in use %t", n, early)
		}
	})
}

// A disk that heeds its context does not hold up the end of itself.
func TestProcess_CloseEndsCalls(t *testing.T) {
	for name, end := range map[string]func(context.Context, *Process) error{
		"CloseDisk": func(ctx context.Context, p *Process) error { return p.CloseDisk(ctx, 1) },
		"Stop":      func(ctx context.Context, p *Process) error { return p.Stop(ctx) },
	} {
		t.Run(name, func(t *testing.T) {
			eachUse(t, func(t *testing.T, b *mapped, use func(context.Context, *Process) error) {
				b.disk.heeds = true
				p := startMapped(t, b)
				done := begin(t, testContext(t), b, func(ctx context.Context) error { return use(ctx, p) })
				if err := end(testContext(t), p); err != nil {
					t.Errorf("%v", err)
				}
				if n, early := b.disk.closes(); n != 1 || early {
					t.Errorf("closed %d times, in use %t", n, early)
				}
				if err := <-done; err == nil {
					t.Error("a call of a disk that is closed has an answer")
				}
			})
		})
	}
}

// A process that stops while a disk hangs leaves the disk open.
func TestProcess_StopWhileCallsHang(t *testing.T) {
	eachUse(t, func(t *testing.T, b *mapped, use func(context.Context, *Process) error) {
		defer close(b.disk.gate)
		p := startMapped(t, b)
		begin(t, testContext(t), b, func(ctx context.Context) error { return use(ctx, p) })
		ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
		defer cancel()
		if err := p.Stop(ctx); err == nil {
			t.Error("the process is stopped in order")
		}
		if n, _ := b.disk.closes(); n != 0 {
			t.Error("the disk is closed while it is in use")
		}
	})
}

// A disk is closed by the call that says so, however often it is resized meanwhile.
func TestProcess_CloseWhileResizing(t *testing.T) {
	for range 300 {
		b := &mapped{memory: newMemory()}
		s := &ioServer{server: &server{}, b: b}
		d, err := newDevice(&b.disk, b.disk.Limits(), &root{})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.disks.add(1, d); err != nil {
			t.Fatal(err)
		}
		began, over := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(over)
			for i := 0; s.disks.get(1) != nil; i++ {
				_, _ = s.resize(t.Context(), 1)
				if i == 10 {
					close(began)
				}
			}
		}()
		<-began
		if err := s.closeDisk(t.Context(), 1); err != nil {
			t.Fatal(err)
		}
		<-over
	}
}
