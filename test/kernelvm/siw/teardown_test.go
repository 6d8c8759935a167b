//go:build linux && cgo && ibverbs

package siw

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// After a hang-up by either end, both ends get their posted work requests back,
// each once.
func TestI006_Siw_Teardown(t *testing.T) {
	v4, _ := addresses(t)
	each(t, func(t *testing.T, active string) {
		for _, by := range []string{"ours", "siw"} {
			t.Run(by+" hangs up", func(t *testing.T) {
				p := connect(t, v4, active)
				p.greet(t)
				for id := range uint64(5) {
					p.our.recv(id, 0, 100)
					p.siw.recv(id, 0, 100)
				}
				p.our.poll()
				p.siw.poll()
				if by == "ours" {
					p.our.qp.Disconnect()
				} else {
					p.siw.qp.Disconnect()
				}
				for _, ends := range [][2]*end{{p.our, p.siw}, {p.siw, p.our}} {
					last, before := ends[0].end(ends[1])
					if last.Status != verbs.StatusOK || len(before) != 5 {
						t.Errorf("%s: last %+v, before it %+v", ends[0].name, last, before)
					}
					for i, wc := range before {
						if wc.ID != uint64(i) || wc.Status != verbs.StatusFlushed || wc.Op != verbs.OpRecv {
							t.Errorf("%s: receive %d ended as %+v", ends[0].name, i, wc)
						}
					}
				}
			})
		}
	})
}

// An answer to a READ that is cut off is an error, whoever reads.
func TestI006_Siw_EndWithAReadOutstanding(t *testing.T) {
	v4, _ := addresses(t)
	t.Run("of ours", func(t *testing.T) {
		p := connect(t, v4, "ours")
		p.greet(t)
		for id := range uint64(16) {
			p.our.send(p.our.to(p.siw, verbs.OpRead, id, 0, memSize, 0))
		}
		p.our.cq.Flush()
		p.siw.qp.Disconnect()
		last, before := p.our.end(p.siw)
		if last.Status == verbs.StatusOK || len(before) != 16 {
			t.Errorf("last %+v, %d completions before it, want 16", last, len(before))
		}
		p.siw.end(p.our)
	})
	t.Run("of siw", func(t *testing.T) {
		p := connect(t, v4, "ours")
		p.greet(t)
		for id := range uint64(8) {
			p.siw.send(p.siw.to(p.our, verbs.OpRead, id, 0, memSize, 0))
		}
		p.siw.poll()
		p.our.qp.Disconnect()
		p.our.end(p.siw)
		if _, before := p.siw.end(p.our); len(before) != 8 {
			t.Errorf("siw completed %d of 8 reads", len(before))
		}
	})
}
