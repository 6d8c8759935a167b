//go:build linux && cgo && ibverbs

package siw

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

var sizes = []int{0, 1, 3, 7, 8, 64, 1427, 1428, 4096, 5001, 65480, 70001, 200001}

// transfers runs f for both roles, with and without CRC, and both directions.
func transfers(t *testing.T, f func(t *testing.T, from, to *end)) {
	v4, _ := addresses(t)
	each(t, func(t *testing.T, active string) {
		for _, c := range []struct {
			name   string
			change func(*iwarp.Config)
		}{{"CRC", func(*iwarp.Config) {}}, {"no CRC", noCRC}} {
			p := connect(t, v4, active, c.change)
			p.greet(t)
			t.Run(c.name+", from ours", func(t *testing.T) { f(t, p.our, p.siw) })
			t.Run(c.name+", from siw", func(t *testing.T) { f(t, p.siw, p.our) })
		}
	})
}

func TestI003_Siw_Send(t *testing.T) {
	transfers(t, func(t *testing.T, from, to *end) {
		for id, n := range sizes {
			sent := from.fill(0, n)
			to.recv(uint64(id), 1000, n+5)
			from.send(from.message(uint64(id), 0, n))
			if wc := to.want(from, verbs.OpRecv, uint64(id)); int(wc.ByteLen) != n || !bytes.Equal(to.mem[1000:1000+n], sent) {
				t.Errorf("%d bytes: %d arrived, equal %v", n, wc.ByteLen, bytes.Equal(to.mem[1000:1000+n], sent))
			}
			from.want(to, verbs.OpSend, uint64(id))
		}
	})
}

// A SEND behind a WRITE tells that the data are there.
func TestI003_Siw_WriteThenSend(t *testing.T) {
	transfers(t, func(t *testing.T, from, to *end) {
		for id, n := range sizes {
			sent := from.fill(0, n)
			clear(to.mem[2000 : 2000+n+1])
			to.recv(uint64(id), 0, 100)
			w := from.to(to, verbs.OpWrite, uint64(id), 0, n, 2000)
			w.Signaled = false
			from.send(w, from.message(uint64(id), 500000, 12))
			to.want(from, verbs.OpRecv, uint64(id))
			if !bytes.Equal(to.mem[2000:2000+n], sent) || to.mem[2000+n] != 0 {
				t.Errorf("%d bytes differ, or more came", n)
			}
			from.want(to, verbs.OpSend, uint64(id))
		}
	})
}

func TestI008_Siw_Read(t *testing.T) {
	transfers(t, func(t *testing.T, from, to *end) {
		for id, n := range sizes {
			want := to.fill(0, n)
			clear(from.mem[:n+1])
			from.send(from.to(to, verbs.OpRead, uint64(id), 0, n, 0))
			from.want(to, verbs.OpRead, uint64(id))
			if !bytes.Equal(from.mem[:n], want) || from.mem[n] != 0 {
				t.Errorf("%d bytes differ, or more came", n)
			}
		}
	})
}

// More READs than either end serves at a time are asked for one after the
// other.
func TestI008_Siw_ManyReads(t *testing.T) {
	const n, size = 60, 3000
	transfers(t, func(t *testing.T, from, to *end) {
		want := to.fill(0, n*size)
		clear(from.mem[:n*size])
		for i := range n {
			from.send(from.to(to, verbs.OpRead, uint64(i), i*size, size, i*size))
		}
		for i := range n {
			from.want(to, verbs.OpRead, uint64(i))
		}
		if !bytes.Equal(from.mem[:n*size], want) {
			t.Error("data differ")
		}
	})
}

// TestSiw_BothAtOnce: both ends write, read and send at the same time; the
// answers to reads travel between the messages.
func TestSiw_BothAtOnce(t *testing.T) {
	v4, _ := addresses(t)
	each(t, func(t *testing.T, active string) {
		p := connect(t, v4, active)
		p.greet(t)
		for round := range 6 {
			size := 1 + rand.IntN(100000)
			for _, e := range []*end{p.our, p.siw} {
				e.fill(0, size)      // to be written to the peer
				e.fill(200000, size) // to be read by it
				e.recv(1, 900000, 50)
			}
			for _, e := range [][2]*end{{p.our, p.siw}, {p.siw, p.our}} {
				me, peer := e[0], e[1]
				read := me.to(peer, verbs.OpRead, 2, 400000, size, 200000)
				rest := []verbs.SendWR{me.to(peer, verbs.OpWrite, 3, 0, size, 600000), me.message(4, 800000, 40)}
				if me == p.our {
					me.send(append([]verbs.SendWR{read}, rest...)...)
				} else { // siw completes work behind a READ before it; verbs does not allow that
					me.send(append(rest, read)...)
				}
			}
			for _, e := range [][2]*end{{p.our, p.siw}, {p.siw, p.our}} {
				me, peer := e[0], e[1]
				seen := map[uint64]bool{}
				for range 4 {
					wc := me.next(peer)
					if wc.Status != verbs.StatusOK {
						t.Fatalf("%s: %+v", me.name, wc)
					}
					seen[wc.ID] = true
				}
				if len(seen) != 4 || !bytes.Equal(me.mem[400000:400000+size], peer.mem[200000:200000+size]) ||
					!bytes.Equal(me.mem[600000:600000+size], peer.mem[:size]) {
					t.Fatalf("round %d, %d bytes: %s completed %v, or data differ", round, size, me.name, seen)
				}
			}
		}
	})
}

// A key that we invalidate at siw is gone.
func TestI004_Row19_Siw_SendInvalidates(t *testing.T) {
	v4, _ := addresses(t)
	p := connect(t, v4, "ours")
	p.greet(t)
	other, err := p.siw.pd.RegMR(p.siw.mem[:4096], verbs.AccessRemoteWrite)
	check(t, err)
	p.siw.recv(1, 100000, 100)
	inv := p.our.message(2, 0, 30)
	inv.Op, inv.RKey = verbs.OpSendInv, other.RKey()
	p.our.send(inv)
	p.siw.want(p.our, verbs.OpRecv, 1) // siw does not tell a program the invalidated key
	p.our.want(p.siw, verbs.OpSendInv, 2)
	p.our.send(verbs.SendWR{ID: 3, Op: verbs.OpWrite, Signaled: true, SGEs: []verbs.SGE{p.our.sge(0, 8)}, RemoteAddr: other.Addr(), RKey: other.RKey()})
	if last, _ := p.our.end(p.siw); last.VendorCode != 0x010100 {
		t.Errorf("write to the dead key: Terminate %06x, want 010100", last.VendorCode)
	}
	p.siw.end(p.our)
	check(t, other.Close())
}
