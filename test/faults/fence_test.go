package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// target is a way to the slow disk.
type target struct {
	name   string
	plugin string
	path   func(*slowdisk.Disk) string
	skew   uint64 // of memory, in bytes
}

func loopPath(d *slowdisk.Disk) string { return d.Loop() }
func filePath(d *slowdisk.Disk) string { return d.Path() }

var targets = []target{
	{"blockio on a loop device", "io-blockio", loopPath, 0},
	{"fileio, direct writes", "io-fileio", filePath, 0},
	{"fileio, writes through the page cache", "io-fileio", filePath, 9},
}

// onTargets runs f for each target and engine, each with a disk of its own.
func onTargets(t *testing.T, f func(t *testing.T, d *slowdisk.Disk, c target, engine string)) {
	for _, c := range targets {
		for _, engine := range []string{"uring", "threads"} {
			t.Run(fmt.Sprintf("%s, %s", c.name, engine), func(t *testing.T) {
				f(t, slowdisk.New(t, 1<<20), c, engine)
			})
		}
	}
}

// Old and new data, by their first byte.
const (
	oldData = 0x0d
	newData = 0xee
)

func TestOpenAfterAKillReturnsOnlyWhenTheOldWritesHaveEnded(t *testing.T) {
	onTargets(t, func(t *testing.T, d *slowdisk.Disk, c target, engine string) {
		path := c.path(d)
		first := launch(t, d, c.plugin, engine)
		first.mustOpen(device, path, blk.ReadWrite)
		d.HoldWrites()
		for tag := range uint64(8) {
			first.write(tag, oldData, c.skew)
		}
		d.WaitHeld(1)
		first.kill()

		second := launch(t, d, c.plugin, engine)
		opened := make(chan error, 1)
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), enough)
			defer cancel()
			opened <- second.open(ctx, device, path, blk.ReadWrite)
		}()
		select {
		case err := <-opened:
			t.Fatalf("open returned (%v) while writes of the dead process were held", err)
		case <-time.After(300 * time.Millisecond):
		}
		d.Release()
		if err := <-opened; err != nil {
			t.Fatalf("open after the old writes ended: %v", err)
		}
		granted := time.Now()
		for tag := range uint64(8) {
			second.write(tag, newData, c.skew)
		}
		for tag := range uint64(8) {
			if e := second.wait(tag); e != blk.OK {
				t.Fatalf("write %d of the new process: %v", tag, e)
			}
		}
		noneLate(t, d, granted)
		for tag := range int64(8) {
			if got := d.Bytes(tag*4096, 1)[0]; got != newData {
				t.Errorf("block %d holds %#x, want the new data", tag, got)
			}
		}
	})
}

// noneLate fails the test if old data reached the medium after the grant, now
// or in the near future.
func noneLate(t *testing.T, d *slowdisk.Disk, granted time.Time) {
	t.Helper()
	time.Sleep(50 * time.Millisecond)
	for _, w := range d.History() {
		if w.First == oldData && (w.Applied.IsZero() || w.Applied.After(granted)) {
			t.Errorf("old write of %d bytes at %d: arrived %v, applied %v, after the grant at %v", w.Len, w.Off, w.Arrived, w.Applied, granted)
		}
	}
}

func TestOpenThatWaitsTooLongIsBusyAndDoesNotGoAhead(t *testing.T) {
	onTargets(t, func(t *testing.T, d *slowdisk.Disk, c target, engine string) {
		path := c.path(d)
		first := launch(t, d, c.plugin, engine)
		first.mustOpen(device, path, blk.ReadWrite)
		d.HoldWrites()
		first.write(0, oldData, c.skew)
		d.WaitHeld(1)
		first.kill()

		second := launch(t, d, c.plugin, engine)
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		// An index of its own: the remains of this open are closed in the
		// background.
		err := second.open(ctx, device+1, path, blk.ReadWrite)
		if err == nil {
			t.Fatal("open went ahead while a write of the dead process was held")
		}
		e := request(blk.Write, 0, 0)
		e.Device = device + 1
		second.start(e)
		if e := second.wait(0); e != blk.ENODEV {
			t.Errorf("a write to the disk that was not opened: %v, want ENODEV", e)
		}
		d.Release()
		second.mustOpen(device, path, blk.ReadWrite)
	})
}

func TestAnotherDeviceOpensWhileOneIsHeld(t *testing.T) {
	slow, quick := slowdisk.New(t, 1<<20), slowdisk.New(t, 1<<20)
	first := launch(t, slow, "io-fileio", "uring")
	first.mustOpen(device, slow.Path(), blk.ReadWrite)
	slow.HoldWrites()
	first.write(0, oldData, 0)
	slow.WaitHeld(1)
	first.kill()

	second := launch(t, slow, "io-fileio", "uring")
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	// Its index is not used again: the host closes it once more.
	if err := second.open(ctx, device+1, slow.Path(), blk.ReadWrite); err == nil {
		t.Fatal("open went ahead while a write of the dead process was held")
	}
	second.mustOpen(device, quick.Path(), blk.ReadWrite)
	second.write(3, newData, 0)
	if e := second.wait(3); e != blk.OK {
		t.Errorf("write to the disk that is not held: %v", e)
	}
}

func TestReadersAreFencedToo(t *testing.T) {
	for _, engine := range []string{"uring", "threads"} {
		t.Run(engine, func(t *testing.T) {
			d := slowdisk.New(t, 1<<20)
			path := d.Loop()
			first := launch(t, d, "io-blockio", engine)
			first.mustOpen(device, path, blk.ReadOnly)
			d.HoldReads()
			first.start(request(blk.Read, 0, 0))
			d.WaitHeld(1)
			first.kill()

			second := launch(t, d, "io-blockio", engine)
			opened := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), enough)
				defer cancel()
				opened <- second.open(ctx, device, path, blk.ReadOnly)
			}()
			select {
			case err := <-opened:
				t.Fatalf("open returned (%v) while a read into shared memory was held", err)
			case <-time.After(300 * time.Millisecond):
			}
			d.Release()
			if err := <-opened; err != nil {
				t.Fatalf("open after the old read ended: %v", err)
			}
		})
	}
}

// TestKillsKeepWhatWasAcknowledged kills one generation after the other with
// writes in flight; the next one stands by and opens the disk at once. Each
// writes its own number; the next replays the requests that the dead one did
// not answer, as a server does.
func TestKillsKeepWhatWasAcknowledged(t *testing.T) {
	const generations, blocks = 4, 8
	onTargets(t, func(t *testing.T, d *slowdisk.Disk, c target, engine string) {
		path := c.path(d)
		var acknowledged [blocks]byte
		var granted [generations + 1]time.Time
		d.SetDelay(10 * time.Millisecond)
		next := launch(t, d, c.plugin, engine)
		for gen := byte(1); gen <= generations; gen++ {
			h := next
			h.mustOpen(device, path, blk.ReadWrite)
			granted[gen] = time.Now()
			if gen < generations {
				next = launch(t, d, c.plugin, engine)
			}
			for tag := range uint64(blocks) {
				h.write(tag, gen, c.skew)
			}
			if gen == generations {
				break // it lives, and answers all
			}
			time.Sleep(time.Duration(rand.IntN(40)) * time.Millisecond)
			h.signal()
			for tag, e := range h.poll() {
				if e != blk.OK {
					t.Fatalf("generation %d, block %d: %v", gen, tag, e)
				}
				acknowledged[tag] = gen
			}
			for tag, want := range acknowledged {
				if got := d.Bytes(int64(tag)*4096, 1)[0]; got < want {
					t.Fatalf("block %d holds generation %d on the medium, %d was acknowledged", tag, got, want)
				}
			}
		}
		for tag := range uint64(blocks) {
			if e := next.wait(tag); e != blk.OK {
				t.Fatalf("replay of block %d: %v", tag, e)
			}
		}
		time.Sleep(50 * time.Millisecond)
		for tag := range int64(blocks) {
			if got := d.Bytes(tag*4096, 1)[0]; got != generations {
				t.Errorf("block %d holds generation %d at the end", tag, got)
			}
		}
		for _, w := range d.History() {
			if n := int(w.First) + 1; w.First > 0 && n <= generations && w.Applied.After(granted[n]) {
				t.Errorf("a write of generation %d at %d was applied %v after the next one's grant", w.First, w.Off, w.Applied.Sub(granted[n]))
			}
		}
	})
}
