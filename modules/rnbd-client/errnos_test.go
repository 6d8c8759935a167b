package client

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// An errno of the storage behind a server is the answer, and not the loss of a path.
func TestErrnoOfTheStorageIsNotTheLossOfAPath(t *testing.T) {
	s := newTarget(t, 1<<20)
	_, io := s.device(s.newClient(), lossQueue(time.Minute))
	for _, errno := range []blk.Errno{blk.ECONNABORTED, blk.ECONNRESET, blk.ECANCELED, blk.EAGAIN, blk.ENODEV} {
		s.set(func() { s.ioErr = errno })
		before := s.count("io")
		if got := do(t, io, aRead); got != errno || s.count("io") != before+1 {
			t.Errorf("the server answers %d: errno %d after %d requests", errno, got, s.count("io")-before)
		}
	}
}

// A request that a server does not know the device of, again and again, ends when the time
// of loss=queue has passed since the first time, although the device opens in between.
func TestPatienceOfARequestCountsFromItsFirstLoss(t *testing.T) {
	s := newTarget(t, 1<<20)
	_, io := s.device(s.newClient(), lossQueue(300*time.Millisecond))
	s.set(func() { s.forgot = 1 << 30 })
	if errno := do(t, io, aRead); errno != blk.EIO {
		t.Errorf("errno %d, want EIO", errno)
	}
}
