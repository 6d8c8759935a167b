package verbstest

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func recvTooSmall(t *testing.T, f Fabric) {
	p := newPair(t, f)
	p.server.recv(p.server.qp, 5, 0, 99)
	p.server.recv(p.server.qp, 6, 200, 500)
	fill(p.client.mem[:100], 1)
	p.client.send(p.client.qp,
		verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true, SGEs: p.client.sge(0, 100, 1)},
		verbs.SendWR{ID: 2, Op: verbs.OpSend, Signaled: true, SGEs: p.client.sge(0, 100, 1)})
	p.settle(1)
	if wc := p.waitFor(p.server, 5); !f.is(wc.Status, verbs.StatusLocalLength) {
		t.Errorf("receive of 99 bytes for a message of 100 completed as %+v", wc)
	}
	if wc := p.waitFor(p.server, 6); wc.Status != verbs.StatusFlushed {
		t.Errorf("receive behind the failed one completed as %+v", wc)
	}
	if !bytes.Equal(p.server.mem[99:200], make([]byte, 101)) {
		t.Error("bytes beyond the receive were written")
	}
}

// reach is one attempt to touch the server's memory.
type reach struct {
	op   verbs.Opcode
	key  uint32
	addr uint64
	size int
}

// outOfReach checks that each access beyond a region is refused, changes nothing,
// and ends the connection at both ends.
func outOfReach(t *testing.T, f Fabric) {
	for _, tt := range reaches {
		t.Run(tt.name, func(t *testing.T) {
			if f.Server.Info().Caps&tt.needs != tt.needs {
				t.Skip("the device lacks the ability")
			}
			stranger := newEnd(t, f.Server) // another protection domain
			p := newPair(t, f)
			for i := range 4 {
				p.server.recv(p.server.qp, uint64(100+i), 0, 0)
			}
			p.refused(tt.make(p, stranger.mr))
			for _, mem := range [][]byte{p.server.mem[:4096], p.server.mem[memSize-64:], stranger.mem[:4096]} {
				if len(bytes.Trim(mem, "\x00")) > 0 {
					t.Error("memory was written")
				}
			}
		})
	}
}

// reaches are operations that must be refused. other is a region of another
// protection domain.
var reaches = []struct {
	name  string
	needs verbs.Cap
	make  func(p *pair, other verbs.MR) reach
}{
	{"a key that was never given", 0, func(p *pair, _ verbs.MR) reach {
		return reach{verbs.OpWrite, p.server.mr.RKey() ^ 0x00ffff00, p.server.at(0), 64}
	}},
	{"a key with another low byte", 0, func(p *pair, _ verbs.MR) reach {
		return reach{verbs.OpWrite, p.server.mr.RKey() ^ 0x55, p.server.at(0), 64}
	}},
	{"a key of another protection domain", 0, func(p *pair, other verbs.MR) reach {
		return reach{verbs.OpWrite, other.RKey(), other.Addr(), 64}
	}},
	{"a write over the end", 0, func(p *pair, _ verbs.MR) reach {
		return reach{verbs.OpWrite, p.server.mr.RKey(), p.server.at(memSize - 63), 64}
	}},
	{"a write over the end with an immediate", verbs.CapWriteImm, func(p *pair, _ verbs.MR) reach {
		return reach{verbs.OpWriteImm, p.server.mr.RKey(), p.server.at(memSize - 63), 64}
	}},
	{"a long write whose end is outside", 0, func(p *pair, _ verbs.MR) reach {
		return reach{verbs.OpWrite, p.server.mr.RKey(), p.server.at(memSize - 100000), 100001}
	}},
	{"a write before the start", 0, func(p *pair, _ verbs.MR) reach {
		return reach{verbs.OpWrite, p.server.mr.RKey(), p.server.at(0) - 1, 64}
	}},
	{"a write that wraps around the address space", 0, func(p *pair, _ verbs.MR) reach {
		return reach{verbs.OpWrite, p.server.mr.RKey(), math.MaxUint64 - 31, 64}
	}},
	{"a read over the end", 0, func(p *pair, _ verbs.MR) reach {
		return reach{verbs.OpRead, p.server.mr.RKey(), p.server.at(memSize - 63), 64}
	}},
	{"a write to memory granted for reads", 0, func(p *pair, _ verbs.MR) reach {
		mr := p.server.grant(verbs.AccessRemoteRead)
		return reach{verbs.OpWrite, mr.RKey(), mr.Addr(), 64}
	}},
	{"a read of memory granted for writes", 0, func(p *pair, _ verbs.MR) reach {
		mr := p.server.grant(verbs.AccessRemoteWrite)
		return reach{verbs.OpRead, mr.RKey(), mr.Addr(), 64}
	}},
	{"a write to an invalidated region", verbs.CapKeyRotation, func(p *pair, _ verbs.MR) reach {
		p.server.mr = p.server.grant(allAccess | verbs.AccessRotate)
		p.server.send(p.server.qp, verbs.SendWR{ID: 77, Op: verbs.OpLocalInv, Signaled: true, RKey: p.server.mr.RKey()})
		p.waitOK(p.server, 77)
		return reach{verbs.OpWrite, p.server.mr.RKey(), p.server.at(0), 64}
	}},
}

// grant registers e's memory once more.
func (e *end) grant(access verbs.Access) verbs.MR {
	e.t.Helper()
	mr := must(e.pd.RegMR(e.mem, access))(e.t)
	e.t.Cleanup(func() { check(e.t, mr.Close()) })
	return mr
}

// refused tries r and a message behind it. The message must not arrive.
func (p *pair) refused(r reach) {
	p.t.Helper()
	fill(p.client.mem[:r.size], 5)
	p.client.send(p.client.qp,
		verbs.SendWR{ID: 1, Op: r.op, Signaled: true, SGEs: p.client.sge(0, r.size, 1), RemoteAddr: r.addr, RKey: r.key},
		verbs.SendWR{ID: 2, Op: verbs.OpSend, Signaled: true})
	p.settle(1)
	refusals := p.client.find(func(wc *verbs.WC) bool { return wc.Status == verbs.StatusRemoteAccess })
	if len(refusals) == 0 {
		p.t.Errorf("no completion, OpDisconnected included, tells StatusRemoteAccess: %+v", tail(p.client.wcs))
	}
	arrived := p.server.find(func(wc *verbs.WC) bool {
		return wc.Op != verbs.OpLocalInv && wc.Status == verbs.StatusOK && wc.Op != verbs.OpDisconnected
	})
	if len(arrived) > 0 {
		p.t.Errorf("something arrived: %+v", arrived)
	}
}

// is reports whether a fault in local memory is reported as it should be.
func (f *Fabric) is(got, want verbs.Status) bool {
	return got == want || f.VagueErrors && got != verbs.StatusOK
}

func localOutside(t *testing.T, f Fabric) {
	p := newPair(t, f)
	foreign := make([]byte, 64)
	wr := verbs.SendWR{ID: 1, Op: verbs.OpWrite, Signaled: true, SGEs: []verbs.SGE{{Buf: foreign, LKey: p.client.mr.LKey()}},
		RemoteAddr: p.server.at(0), RKey: p.server.mr.RKey()}
	fill(foreign, 1)
	switch n, err := p.client.qp.PostSend([]verbs.SendWR{wr}); {
	case errors.Is(err, verbs.ErrAccess):
	case err != nil || n != 1:
		t.Errorf("PostSend took %d, %v", n, err)
	default:
		if wc := p.waitFor(p.client, 1); !f.is(wc.Status, verbs.StatusLocalProt) {
			t.Errorf("completed as %+v", wc)
		}
		p.settle(1)
	}
	if len(bytes.Trim(p.server.mem[:64], "\x00")) > 0 {
		t.Error("memory that is not registered was sent")
	}
}

// rotate invalidates key and registers its region under the next one.
func (e *end) rotate(key uint32, id uint64) (next uint32, wrs []verbs.SendWR) {
	next = verbs.NextKey(key)
	return next, []verbs.SendWR{
		{ID: id, Op: verbs.OpLocalInv, RKey: key},
		{ID: id, Op: verbs.OpRegMR, Signaled: true, RKey: next},
	}
}

func rotateKey(t *testing.T, f Fabric) {
	p := newPair(t, f)
	p.server.mr = p.server.grant(allAccess | verbs.AccessRotate)
	other, otherServer := p.connect(f.Addr, 2) // of the same protection domain
	key := p.server.mr.RKey()
	var wrs []verbs.SendWR
	const rounds = 300 // the low byte wraps
	for i := range rounds {
		old := key
		key, wrs = p.server.rotate(key, uint64(i))
		p.server.send(p.server.qp, wrs...)
		p.waitOK(p.server, uint64(i))
		if key>>8 != old>>8 {
			t.Fatalf("key %#x follows %#x", key, old)
		}
	}
	for i, qp := range []verbs.QP{p.client.qp, other} {
		server := []verbs.QP{p.server.qp, otherServer}[i]
		id := uint64(1000 + i)
		fill(p.client.mem[:100], i)
		p.server.recv(server, id, 0, 0)
		p.client.send(qp,
			verbs.SendWR{Op: verbs.OpWrite, SGEs: p.client.sge(0, 100, 1), RemoteAddr: p.server.at(4096 * (i + 1)), RKey: key},
			verbs.SendWR{ID: id, Op: verbs.OpSend, Signaled: true})
		p.waitOK(p.server, id)
		if at := filled(p.server.mem[4096*(i+1):][:100], i); at >= 0 {
			t.Errorf("byte %d written with the new key is wrong", at)
		}
	}
	clear(p.server.mem)
	p.server.wcs = nil
	p.refused(reach{verbs.OpWrite, (key-1)&0xff | key&^0xff, p.server.at(0), 64})
	if len(bytes.Trim(p.server.mem[:4096], "\x00")) > 0 {
		t.Error("the old key reached memory")
	}
}

// rotateChain does the same as an RTRS server for each I/O: the answer
// follows the rotation in one batch, and the peer uses the key at once.
func rotateChain(t *testing.T, f Fabric) {
	p := newPair(t, f)
	p.server.mr = p.server.grant(allAccess | verbs.AccessRotate)
	key := p.server.mr.RKey()
	const rounds = 100
	for i := range rounds {
		id := uint64(i)
		p.server.recv(p.server.qp, id, 0, 0)
		p.client.recv(p.client.qp, 1000+id, memSize-8, 8)
		fill(p.client.mem[:100], i)
		p.client.send(p.client.qp,
			verbs.SendWR{Op: verbs.OpWrite, SGEs: p.client.sge(0, 100, 1), RemoteAddr: p.server.at(4096), RKey: key},
			verbs.SendWR{ID: 2000 + id, Op: verbs.OpSend, Signaled: true})
		p.waitOK(p.server, id)
		if at := filled(p.server.mem[4096:][:100], i); at >= 0 {
			t.Fatalf("byte %d of round %d is wrong", at, i)
		}
		var wrs []verbs.SendWR
		key, wrs = p.server.rotate(key, 3000+id)
		p.server.send(p.server.qp, append(wrs, verbs.SendWR{ID: 4000 + id, Op: verbs.OpSendImm, Signaled: true, Imm: key})...)
		if wc := p.waitOK(p.client, 1000+id); wc.Imm != key {
			t.Fatalf("told key %#x, want %#x", wc.Imm, key)
		}
	}
}

// rotateByTwo rotates the keys of one region between two owners: each answers
// with the next key, and on the answer the client asks the other owner. The
// chunks of an RTRS server with several pumps are used in this way.
func rotateByTwo(t *testing.T, f Fabric) {
	client, server := newEnd(t, f.Client), newEnd(t, f.Server)
	mr := server.grant(allAccess | verbs.AccessRotate)
	c := newOwner(client)
	var asked [2]verbs.QP
	ended := make(chan error, 2)
	var key atomic.Uint32 // of the owner that is asked
	key.Store(mr.RKey())
	for i := range asked {
		s := newOwner(server)
		asked[i] = must(f.Client.CreateQP(client.pd, verbs.QPConfig{CQ: c.cq, Context: uint64(i), SendQueue: queueDepth, RecvQueue: queueDepth, MaxSGE: 1}))(t)
		t.Cleanup(asked[i].Destroy)
		for id := range queueDepth {
			server.recv(s.qp, uint64(id), 0, 0)
			client.recv(asked[i], uint64(id), memSize-8, 0)
		}
		dial(t, f.Client, f.Server, f.Addr, asked[i], s.qp)
		go func() { ended <- s.rotateWhenAsked(&key, i) }()
	}
	const rounds = 400
	use := mr.RKey()
	for round := range rounds {
		fill(client.mem[:64], round)
		wrs := []verbs.SendWR{
			{Op: verbs.OpWrite, SGEs: client.sge(0, 64, 1), RemoteAddr: mr.Addr() + uint64(4096*(1+round%2)), RKey: use},
			{Op: verbs.OpSend, Signaled: true},
		}
		if _, err := asked[round%2].PostSend(wrs); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		use = c.nextKey(asked[round%2], round)
	}
	for _, qp := range asked {
		qp.Disconnect()
	}
	for left := 2; left > 0; {
		var wcs [4]verbs.WC
		for _, wc := range wcs[:c.cq.Poll(wcs[:])] {
			if wc.Op == verbs.OpDisconnected {
				left--
			}
		}
	}
	check(t, <-ended)
	check(t, <-ended)
}

// nextKey waits for the answer of a round and returns its immediate. qp gets another
// receive for it.
func (o *owner) nextKey(qp verbs.QP, round int) (key uint32) {
	t := o.end.t
	for idle, seen := newStallTimer(), false; !seen; {
		var wcs [4]verbs.WC
		for _, wc := range wcs[:o.cq.Poll(wcs[:])] {
			if wc.Status != verbs.StatusOK || wc.Op == verbs.OpDisconnected {
				t.Fatalf("round %d: completion %+v", round, wc)
			}
			if wc.HasImm {
				key, seen = wc.Imm, true
				o.end.recv(qp, wc.ID, memSize-8, 0)
			}
		}
		if idle.expired() {
			t.Fatalf("no answer in round %d", round)
		}
	}
	return key
}

// rotateWhenAsked answers the messages of every other round, from round on, with
// the next key, until the connection ends.
func (o *owner) rotateWhenAsked(key *atomic.Uint32, round int) error {
	mem := o.end.mem[4096*(1+round):][:64]
	for idle := newStallTimer(); !idle.expired(); runtime.Gosched() {
		var wcs [4]verbs.WC
		for _, wc := range wcs[:o.cq.Poll(wcs[:])] {
			idle = newStallTimer()
			switch {
			case wc.Op == verbs.OpDisconnected:
				return nil
			case wc.Status == verbs.StatusFlushed || wc.Op != verbs.OpRecv:
				continue
			case wc.Status != verbs.StatusOK:
				return fmt.Errorf("completion %+v", wc)
			}
			if at := filled(mem, round); at >= 0 {
				return fmt.Errorf("byte %d of round %d is wrong", at, round)
			}
			round += 2
			old := key.Load()
			next := verbs.NextKey(old)
			key.Store(next)
			o.qp.PostRecv([]verbs.RecvWR{{ID: wc.ID}})
			wrs := []verbs.SendWR{{Op: verbs.OpLocalInv, RKey: old}, {Op: verbs.OpRegMR, RKey: next}, {Op: verbs.OpSendImm, Signaled: true, Imm: next}}
			if _, err := o.qp.PostSend(wrs); err != nil {
				return fmt.Errorf("answer: %w", err)
			}
		}
	}
	return errors.New("nobody asked")
}

func sendInvalidate(t *testing.T, f Fabric) {
	p := newPair(t, f)
	extra := p.server.grant(allAccess)
	p.server.recv(p.server.qp, 1, 0, 8)
	p.server.recv(p.server.qp, 2, 8, 8)
	fill(p.client.mem[:8], 2)
	p.client.send(p.client.qp,
		verbs.SendWR{ID: 3, Op: verbs.OpSendInv, Signaled: true, RKey: extra.RKey(), SGEs: p.client.sge(0, 8, 1)},
		verbs.SendWR{ID: 4, Op: verbs.OpSend, Signaled: true})
	wc := p.waitOK(p.server, 1)
	if wc.Op != verbs.OpRecv || !wc.HasInv || wc.InvKey != extra.RKey() || wc.HasImm || wc.ByteLen != 8 || filled(p.server.mem[:8], 2) >= 0 {
		t.Errorf("message arrived as %+v", wc)
	}
	if wc := p.waitOK(p.server, 2); wc.HasInv {
		t.Errorf("message without invalidation arrived as %+v", wc)
	}
	p.waitOK(p.client, 4)
	clear(p.server.mem)
	p.client.wcs, p.server.wcs = nil, nil
	p.refused(reach{verbs.OpWrite, extra.RKey(), extra.Addr(), 64})
}
