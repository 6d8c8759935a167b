package server

import (
	"context"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
)

func TestDeviceStates_OnlyMovesOfTheDrawing(t *testing.T) {
	for from := devOpening; from <= devClosed; from++ {
		for to := devOpening; to <= devClosed; to++ {
			d := &device{plugin: &ioPlugin{server: &Server{}}}
			d.word.Store(uint32(from))
			want := false
			for _, m := range devMoves[from] {
				want = want || m == to
			}
			if got := d.setState(to); got != want || want != (d.currentState() == to && from != to) {
				t.Errorf("from %d to %d: moved %t, want %t, and is %d", from, to, got, want, d.currentState())
			}
			if d.isServing() && d.isFailing() {
				t.Errorf("state %d serves and fails", d.currentState())
			}
		}
	}
}

func TestDeviceStates_ForGoodIsForGood(t *testing.T) {
	for why, want := range map[failureReason]bool{failedLost: true, failedShrunk: true, failedPlugin: false, failedOpen: false} {
		if why.forGood() != want {
			t.Errorf("failure %d is for good: %t", why, !want)
		}
	}
}

// alive is a dead process with a thread that still runs.
type alive struct {
	supervise.Process
	reaped chan struct{}
}

func (p *alive) Reaped() <-chan struct{} { return p.reaped }

// A plugin that keeps nothing takes no lock: its requests are answered when no
// thread of its process can touch their memory.
func TestRequestsOfAPluginThatLosesAllWaitForItsThreads(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	reaped := make(chan struct{})
	r := newRig(t, mem, func(c *Config) {
		launch := c.Launch
		c.Launch = func(ctx context.Context, pc plugin.Config) (supervise.Process, error) {
			p, err := launch(ctx, pc)
			return &alive{p, reaped}, err
		}
	})
	i := r.connect("s")
	dev, err := i.open("a", blk.ReadWrite)
	must(t, err)
	mem.setHold(true)
	write := i.start(false, 512, ioMessage(dev.DeviceID, blk.Write, 0, 0, 512))
	eventually(t, "the plugin has the write", func() bool { return len(mem.requests()) == 1 })
	r.process().Kill()
	eventually(t, "the device fails", func() bool { return r.server.openDevicesByName("a").isFailing() })
	select {
	case errno := <-write:
		t.Errorf("answered with %d while a thread of the plugin runs", errno)
	case <-time.After(50 * time.Millisecond):
	}
	close(reaped)
	if errno := i.await(write); errno != blk.EIO {
		t.Errorf("errno %d, want EIO", errno)
	}
}
