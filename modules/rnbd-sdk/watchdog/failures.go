package watchdog

// DATA PATH. A pump counts a failed request here, by Failures.Count and
// Recent.Add.

import (
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Stage is the place at which a request failed or hangs.
type Stage uint8

const (
	Check  Stage = iota // refused by the checks of this daemon
	Queue               // waits, or waited, in this daemon
	Wire                // on its way to the server or back
	Server              // the server's answer
	Plugin              // in the storage plugin
	Fence               // waits for the end of I/O of a dead plugin
	Turn                // waits for another client's repeated write
	stages
)

var stageNames = [stages]string{"check", "queue", "wire", "server", "plugin", "fence", "turn"}

func (s Stage) String() string { return stageNames[s] }

// errnos are told apart; all others are counted as one. The list bounds the
// series that a peer can make.
var errnos = [...]blk.Errno{
	blk.EPERM, blk.ENOENT, blk.EIO, blk.ENXIO, blk.EAGAIN, blk.ENOMEM, blk.EACCES, blk.EBUSY, blk.ENODEV,
	blk.EINVAL, blk.ENOSPC, blk.EROFS, blk.EOPNOTSUPP, blk.ENOTCONN, blk.ETIMEDOUT, blk.ECANCELED,
	blk.EMSGSIZE, blk.ECONNABORTED, blk.ECONNRESET, blk.EREMCHG,
}

// OtherErrno is the name of the errnos that are not told apart.
const OtherErrno = "other"

// places has the index in errnos, plus one, by errno; 0: none.
var places = func() (p [256]uint8) {
	for i, e := range errnos {
		p[e] = uint8(i + 1)
	}
	return p
}()

// table has the counts by stage and place.
type table [stages][len(errnos) + 1]atomic.Uint64

// Failures counts the failed requests of one device on one pump. The zero value
// is empty, and small: the first failure allocates the counts. One goroutine
// at a time writes.
type Failures struct{ counts atomic.Pointer[table] }

// Count counts a request that failed with e, which is not 0.
func (f *Failures) Count(s Stage, e blk.Errno) {
	t := f.counts.Load()
	if t == nil {
		t = new(table)
		f.counts.Store(t)
	}
	place := uint8(0)
	if int(e) < len(places) {
		place = places[e]
	}
	c := &t[s][place]
	c.Store(c.Load() + 1)
}

// Failure is one failed request of a device.
type Failure[D any] struct {
	Device D
	Op     blk.Op
	Stage  Stage
	Errno  blk.Errno
	Len    uint32
	Offset uint64
}

// recent is the number of failures that wait to be logged.
const recent = 64

// Recent passes failures from one pump to one reader. Those that find no room
// are dropped: Failures has counted them.
type Recent[D any] struct {
	ring          [recent]Failure[D]
	written, read atomic.Uint64
}

// Add adds f if there is room. Only the pump calls it.
func (r *Recent[D]) Add(f Failure[D]) {
	w := r.written.Load()
	if w-r.read.Load() == recent {
		return
	}
	r.ring[w%recent] = f
	r.written.Store(w + 1)
}

// Take calls f for each failure and removes it. Only one goroutine at a time
// calls it.
func (r *Recent[D]) Take(f func(Failure[D])) {
	for i := r.read.Load(); i < r.written.Load(); i++ {
		one := r.ring[i%recent]
		r.ring[i%recent] = Failure[D]{} // keeps no device alive
		r.read.Store(i + 1)
		f(one)
	}
}
