package rocev2

import (
	"bytes"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Release implements softverbs.Owner. Nothing new reaches the memory, because
// every placement, READ response and first transmission looks the key up in the
// same turn of the owner. Packets that may be sent again are copied.
func (c *compQueue) Release(r *softverbs.Region) {
	c.Turn.Lock()
	defer c.Turn.Unlock()
	for _, o := range c.outs {
		o.letGo(r)
	}
	for _, q := range c.Slots {
		if q != nil {
			q.letGo(r)
		}
	}
}

// letGo copies the payload of requests that may have to be sent again out of the
// memory of r. It does not read requests that were not started, since the owner
// may post meanwhile: assignPSNs finds that their key is gone.
func (q *qp) letGo(r *softverbs.Region) {
	if q.End.State != softverbs.EndNone {
		return // nothing is sent any more
	}
	for at := q.req.una.at; at < q.req.begun; at++ {
		if q.SQ.At(at).Op == verbs.OpRead {
			continue // the key is looked up before each placement
		}
		sges := q.SQ.Elements(at)
		for i := range sges {
			if s := &sges[i]; s.LKey == r.LKey() {
				*s = verbs.SGE{Buf: bytes.Clone(s.Buf)}
			}
		}
	}
}

// holdsAll reports whether the elements of the request at a position are still
// registered.
func (q *qp) holdsAll(at uint64) bool { return q.Domain.HoldsAll(q.SQ.Elements(at)) }
