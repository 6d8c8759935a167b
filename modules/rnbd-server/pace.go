package server

import (
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
)

// DATA PATH. Token buckets in one atomic word each.

// pace are limits in the units of the buckets.
type pace struct {
	access.Limits
	op                 int64 // ns of a request; 0: no limit
	opSlack, byteSlack int64 // ns that a bucket may owe when a request begins
}

// bucket is a time on the pumps' clock. All tokens that were taken are paid for by
// then.
type bucket struct{ paid atomic.Int64 }

func (b *bucket) take(now, cost int64) {
	for {
		old := b.paid.Load()
		if b.paid.CompareAndSwap(old, max(old, now)+cost) {
			return
		}
	}
}

const second = int64(time.Second)

func newPace(l access.Limits) *pace {
	p := &pace{Limits: l}
	if l.IOPS > 0 {
		burst := l.IOPSBurst
		if burst == 0 {
			burst = max(l.IOPS/10, 1)
		}
		p.op = second / l.IOPS
		p.opSlack = int64(float64(p.op) * float64(burst-1))
	}
	if l.Bytes > 0 {
		p.byteSlack = second / 10
		if l.BytesBurst > 0 {
			p.byteSlack = p.bytes(l.BytesBurst)
		}
	}
	return p
}

// bytes returns the ns that n bytes cost.
func (p *pace) bytes(n int64) int64 { return int64(float64(n) / float64(p.Bytes) * float64(second)) }
