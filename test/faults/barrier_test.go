package faults

import (
	"bytes"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// barrierRig is a device on a slow disk, and all processes on the way to it.
type barrierRig struct {
	disk *slowdisk.Disk
	nbd  *nbdclient.Client
	pids []int
}

func newBarrierRig(t *testing.T, target slowTarget) *barrierRig {
	t.Helper()
	r := &barrierRig{disk: slowdisk.New(t, 4<<20)}
	search, device := target.serve(r.disk)
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: search, Plugins: []string{target.plugin}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, device, s)
	r.nbd = mustDial(t, c, d.Name)
	storage, err := s.Plugin(target.plugin)
	if err != nil {
		t.Fatal(err)
	}
	front, err := c.Plugin("nbd")
	if err != nil {
		t.Fatal(err)
	}
	r.pids = []int{int(front.Pid), c.PID(), s.PID(), int(storage.Pid)}
	r.disk.SetDelay(5 * time.Millisecond)
	return r
}

// killAll ends the four processes of the data path at once.
func (r *barrierRig) killAll(t *testing.T) {
	t.Helper()
	for _, pid := range r.pids {
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && err != syscall.ESRCH { // a plugin may have followed its host
			t.Errorf("kill %d: %v", pid, err)
		}
	}
}

func (r *barrierRig) onTheMedium(t *testing.T, blocks int) {
	t.Helper()
	for i := range blocks {
		if got := r.disk.Bytes(int64(i)*4096, 4096); !bytes.Equal(got, bytes.Repeat([]byte{byte(i + 1)}, 4096)) {
			t.Errorf("block %d of the medium begins with %#x", i, got[0])
		}
	}
}

// synced reports whether a sync of the medium was requested between from and
// now.
func (r *barrierRig) synced(from time.Time) bool {
	for _, at := range r.disk.Syncs() {
		if at.After(from) {
			return true
		}
	}
	return false
}

// A flush covers every write that was answered before it was sent: with all
// processes dead right after it, the medium has them, and was told to keep them.
func TestAFlushCoversWhatWasWritten(t *testing.T) {
	for _, target := range slowTargets {
		t.Run(target.name, func(t *testing.T) {
			const blocks = 32
			r := newBarrierRig(t, target)
			errs := make(chan error, blocks)
			for i := range blocks {
				go func() {
					_, err := r.nbd.WriteAt(bytes.Repeat([]byte{byte(i + 1)}, 4096), int64(i)*4096)
					errs <- err
				}()
			}
			for range blocks {
				if err := <-errs; err != nil {
					t.Fatal(err)
				}
			}
			written := time.Now()
			if err := r.nbd.Flush(); err != nil {
				t.Fatal(err)
			}
			ok := r.synced(written)
			r.killAll(t)
			if !ok {
				t.Error("the flush was answered, and the medium was told nothing")
			}
			r.onTheMedium(t, blocks)
		})
	}
}

// A write with FUA is on the medium when it is answered, without a flush.
func TestAWriteWithFUAIsOnTheMedium(t *testing.T) {
	for _, target := range slowTargets {
		t.Run(target.name, func(t *testing.T) {
			r := newBarrierRig(t, target)
			for i := range 3 {
				begun := time.Now()
				if _, err := r.nbd.Write(bytes.Repeat([]byte{byte(i + 1)}, 4096), int64(i)*4096, nbdclient.FUA); err != nil {
					t.Fatal(err)
				}
				if !r.synced(begun) {
					t.Errorf("write %d was answered, and the medium was told nothing", i)
				}
			}
			r.killAll(t)
			r.onTheMedium(t, 3)
		})
	}
}
