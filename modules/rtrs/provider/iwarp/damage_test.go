package iwarp

import (
	"bytes"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// damagedSegments is how many damaged segments TestI010 tries.
func damagedSegments() int {
	switch {
	case os.Getenv("RNBD_LONG") != "":
		return 10_000_000
	case testing.Short():
		return 20_000
	}
	return 100_000
}

// damage changes 1 to 8 bits of b, or up to 32 bytes in a row, and returns
// false if b is the same afterwards.
func damage(rnd *rand.Rand, b []byte) bool {
	before := bytes.Clone(b)
	if kind := rnd.IntN(4); kind < 3 {
		for range 1 + rnd.IntN(1<<kind*2) {
			b[rnd.IntN(len(b))] ^= 1 << rnd.IntN(8)
		}
	} else {
		for at, n := rnd.IntN(len(b)), 1+rnd.IntN(32); n > 0 && at < len(b); at, n = at+1, n-1 {
			b[at] = byte(rnd.Uint32())
		}
	}
	return !bytes.Equal(b, before)
}

// renew takes the queue pair back to the state before its first segment.
func (o *offline) renew() {
	q := o.q
	stage, v := q.rx.stage, q.rx.v
	q.rx = receiveHalf{stage: stage, v: v, crcOn: true, msn: [3]uint32{1, 1, 1}}
	q.End = softverbs.End{}
	q.Set(softverbs.Up)
	q.Attached = true
	q.tx.term = false
	q.setDeadline(0)
	o.wcs = o.wcs[:0]
}

func TestI010_NoDamagedSegmentPassesTheCRC(t *testing.T) {
	o := newOffline(t, bothTerms())
	_, r := o.region(4096, verbs.AccessRemoteWrite)
	rnd := rand.New(rand.NewPCG(1, 10))
	payload := make([]byte, 280)
	for i := range payload {
		payload[i] = byte(rnd.Uint32())
	}
	segment := segment{op: opWrite, stag: r.RKey(), to: r.Addr(), payload: payload}.bytes(true)
	if o.renew(); o.feed(segment, len(segment)) != len(segment) || !o.q.rx.met {
		t.Fatal("the segment is refused without damage")
	}
	b := make([]byte, len(segment))
	passed, n := 0, damagedSegments()
	for tried := 0; tried < n; {
		copy(b, segment)
		if !damage(rnd, b) {
			continue
		}
		tried++
		o.renew()
		o.feed(b, len(b))
		if o.q.rx.met {
			passed++
		}
	}
	if passed != 0 {
		t.Errorf("%d of %d damaged segments passed", passed, n)
	}
}
