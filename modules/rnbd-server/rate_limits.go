package server

import (
	"sync/atomic"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
)

// DATA PATH. Token buckets in one atomic word each.

// rateLimits are limits in the units of the buckets.
type rateLimits struct {
	access.Limits
	op                 int64 // ns of a request; 0: no limit
	opSlack, byteSlack int64 // ns that a bucket may owe when a request begins
}

// tokenBucket is a time on the pumps' clock. All tokens that were taken are paid for by
// then.
type tokenBucket struct{ paid atomic.Int64 }

func (b *tokenBucket) takeTokens(now, cost int64) {
	for {
		old := b.paid.Load()
		if b.paid.CompareAndSwap(old, max(old, now)+cost) {
			return
		}
	}
}

const second = int64(time.Second)

func newPace(l access.Limits) *rateLimits {
	p := &rateLimits{Limits: l}
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
			p.byteSlack = p.byteCost(l.BytesBurst)
		}
	}
	return p
}

// byteCost returns the ns that n bytes cost.
func (p *rateLimits) byteCost(n int64) int64 {
	return int64(float64(n) / float64(p.Bytes) * float64(second))
}
