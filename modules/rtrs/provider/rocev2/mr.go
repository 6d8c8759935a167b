package rocev2

import (
	"bytes"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Release implements softverbs.Owner. Nothing new reaches the memory, because
// every placement, READ response and first transmission looks the key up in the
// same turn of the owner. What may be sent again is copied.
func (c *cq) Release(r *softverbs.Region) {
	c.turn.Lock()
	defer c.turn.Unlock()
	for _, o := range c.outs {
		o.letGo(r)
	}
	for left, i := c.attached, 0; left > 0; i++ {
		if q := c.table[i]; q != nil {
			left--
			q.letGo(r)
		}
	}
}

// letGo moves the payload of requests that may have to be sent again out of the
// memory of r. The owner may post meanwhile, so requests that were not started
// are not looked at: start finds that their key is gone.
func (q *qp) letGo(r *softverbs.Region) {
	if q.end.state != endNone {
		return // nothing is sent any more
	}
	for at := q.req.una.at; at < q.req.begun; at++ {
		e := &q.sq[at&q.sqMask]
		if e.op == verbs.OpRead {
			continue // the key is looked up before each placement
		}
		for i := range e.nsge {
			s := &q.sges[int(at&q.sqMask)*q.maxSGE+int(i)]
			if s.LKey == r.LKey() {
				*s = verbs.SGE{Buf: bytes.Clone(s.Buf)}
			}
		}
	}
}

// holdsAll reports whether the elements of entry at are still registered.
func (q *qp) holdsAll(at uint64) bool {
	slot := int(at & q.sqMask)
	for i := range int(q.sq[slot].nsge) {
		if s := &q.sges[slot*q.maxSGE+i]; !q.pd.Holds(s.LKey, s.Buf) {
			return false
		}
	}
	return true
}
