package verbstest

import (
	"errors"
	"fmt"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Places in the memory of the ends that transfers use.
const (
	srcOff  = 64 << 10
	dstOff  = 16
	bigSize = 1 << 20
)

// operationTable has the requests with payload and their effect at the peer.
var operationTable = []struct {
	name   string
	op     verbs.Opcode
	needs  verbs.Cap
	recv   verbs.Opcode // consumes a receive at the peer, 0: nothing
	hasImm bool
}{
	{"send", verbs.OpSend, 0, verbs.OpRecv, false},
	{"send with immediate", verbs.OpSendImm, verbs.CapSendImm, verbs.OpRecv, true},
	{"write", verbs.OpWrite, 0, 0, false},
	{"write with immediate", verbs.OpWriteImm, verbs.CapWriteImm, verbs.OpRecvImm, true},
	{"read", verbs.OpRead, 0, 0, false},
}

func operations(t *testing.T, f Fabric) {
	for _, tt := range operationTable {
		t.Run(tt.name, func(t *testing.T) {
			if f.Client.Info().Caps&tt.needs != tt.needs {
				t.Skip("the device lacks the ability")
			}
			p := newPair(t, f)
			p.transfer(tt.op, 5000, 1)
		})
	}
}

// transfer moves size bytes by op from the client, or for OpRead to it, and
// checks them and all completions.
func (p *pair) transfer(op verbs.Opcode, size, parts int) {
	p.t.Helper()
	from, to := p.client, p.server
	if op == verbs.OpRead {
		from, to = to, from
	}
	p.client.wcs, p.server.wcs = nil, nil
	fill(from.mem[srcOff:][:size], size+parts)
	clear(to.mem[:dstOff+size+64])
	wr := verbs.SendWR{ID: 7, Op: op, Signaled: true, Imm: 0xdeadbe01}
	switch op {
	case verbs.OpRead:
		wr.SGEs = to.sge(dstOff, size, parts)
		wr.RemoteAddr, wr.RKey = from.at(srcOff), from.mr.RKey()
	case verbs.OpWrite, verbs.OpWriteImm:
		wr.SGEs = from.sge(srcOff, size, parts)
		wr.RemoteAddr, wr.RKey = to.at(dstOff), to.mr.RKey()
		p.server.recv(p.server.qp, 9, memSize-8, 0)
	default:
		wr.SGEs = from.sge(srcOff, size, parts)
		p.server.recv(p.server.qp, 9, dstOff, size)
	}
	p.client.send(p.client.qp, wr)
	if op == verbs.OpWrite { // an own message tells that it has arrived
		p.client.send(p.client.qp, verbs.SendWR{Op: verbs.OpSend})
	}
	sent := p.waitOK(p.client, 7)
	if sent.Op != op || sent.QP != 1 {
		p.t.Errorf("completion of operation %d is %+v", op, sent)
	}
	if op != verbs.OpRead {
		p.checkReceived(op, p.waitOK(p.server, 9), size)
	}
	p.checkBytes(to.mem[:dstOff+size+64], size, size+parts)
}

func (p *pair) checkReceived(op verbs.Opcode, wc verbs.WC, size int) {
	p.t.Helper()
	want := verbs.WC{ID: 9, QP: 1, Op: verbs.OpRecv, ByteLen: uint32(size)}
	switch op {
	case verbs.OpWriteImm:
		want.Op, want.HasImm, want.Imm = verbs.OpRecvImm, true, 0xdeadbe01
	case verbs.OpSendImm:
		want.HasImm, want.Imm = true, 0xdeadbe01
	case verbs.OpWrite:
		want.ByteLen = 0 // of the message that followed
	}
	wc.VendorCode = 0
	if wc != want {
		p.t.Errorf("receive completed as %+v, want %+v", wc, want)
	}
}

// checkBytes checks that mem holds the pattern of seed and nothing around it.
func (p *pair) checkBytes(mem []byte, size, seed int) {
	p.t.Helper()
	if i := filled(mem[dstOff:][:size], seed); i >= 0 {
		p.t.Fatalf("byte %d of %d is wrong", i, size)
	}
	for i, b := range mem {
		if b != 0 && (i < dstOff || i >= dstOff+size) {
			p.t.Fatalf("byte %d beside a message of %d was written", i-dstOff, size)
		}
	}
}

func unsupported(t *testing.T, f Fabric) {
	p := newPair(t, f)
	caps := f.Client.Info().Caps
	for op, need := range map[verbs.Opcode]verbs.Cap{
		verbs.OpSendImm:  verbs.CapSendImm,
		verbs.OpWriteImm: verbs.CapWriteImm,
		verbs.OpSendInv:  verbs.CapSendInv,
		verbs.OpLocalInv: verbs.CapKeyRotation,
		verbs.OpRegMR:    verbs.CapKeyRotation,
		verbs.OpRecv:     1 << 31, // no operation of a send queue
		0:                1 << 31,
	} {
		if caps&need != 0 {
			continue
		}
		n, err := p.client.qp.PostSend([]verbs.SendWR{{ID: 1, Op: op, Signaled: true}})
		if n != 0 || !errors.Is(err, verbs.ErrUnsupported) {
			t.Errorf("PostSend of operation %d took %d, %v", op, n, err)
		}
	}
	p.transfer(verbs.OpWrite, 100, 1) // the connection has not noticed
}

func zeroLength(t *testing.T, f Fabric) {
	p := newPair(t, f)
	p.server.recv(p.server.qp, 1, 0, 0)
	p.client.send(p.client.qp,
		verbs.SendWR{ID: 2, Op: verbs.OpWrite, Signaled: true, RemoteAddr: 12345, RKey: 0xbad},
		verbs.SendWR{ID: 3, Op: verbs.OpWriteImm, Signaled: true, Imm: 5, RemoteAddr: 12345, RKey: 0xbad})
	if wc := p.waitOK(p.server, 1); wc.Imm != 5 || wc.ByteLen != 0 {
		t.Errorf("received %+v", wc)
	}
	p.waitOK(p.client, 2)
	p.waitOK(p.client, 3)
}

func sizes(t *testing.T, f Fabric) {
	p := newPair(t, f)
	ops := []verbs.Opcode{verbs.OpSend, verbs.OpWrite, verbs.OpRead}
	if f.Client.Info().Caps&verbs.CapWriteImm != 0 {
		ops = append(ops, verbs.OpWriteImm)
	}
	most := min(4, f.Client.Info().MaxSGE)
	for _, size := range []int{0, 1, 2, 3, 4, 5, 31, 511, 512, 1023, 1025, 1460, 1461, 4095, 4096, 4097, 65535, 65537, 131072, bigSize - 1, bigSize} {
		for _, op := range ops {
			for _, parts := range []int{1, 2, most} {
				if op == verbs.OpRead && parts > 1 {
					continue // no fabric promises gathering reads
				}
				p.transfer(op, size, min(parts, most))
			}
		}
	}
}

func immediates(t *testing.T, f Fabric) {
	p := newPair(t, f)
	for i, imm := range []uint32{0, 1, 0x80, 0x01020304, 0x0fffffff, 0x80000000, 0x90000000, 0xfffffffe, 0xffffffff} {
		id := uint64(i + 1)
		p.server.recv(p.server.qp, id, 0, 0)
		p.client.send(p.client.qp, verbs.SendWR{ID: id, Op: verbs.OpWriteImm, Signaled: true, Imm: imm})
		if wc := p.waitOK(p.server, id); !wc.HasImm || wc.Imm != imm {
			t.Errorf("immediate %#x arrived as %+v", imm, wc)
		}
	}
}

func writeBeforeImm(t *testing.T, f Fabric) {
	p := newPair(t, f)
	const rounds, piece = 32, 3000
	for i := range rounds {
		p.server.recv(p.server.qp, uint64(i), 0, 0)
	}
	for i := range rounds {
		fill(p.client.mem[i*piece:][:piece], i)
		var wrs []verbs.SendWR
		for part := range 2 { // two writes, then the word
			off := i*piece + part*piece/2
			wrs = append(wrs, verbs.SendWR{Op: verbs.OpWrite, SGEs: p.client.sge(off, piece/2, 1), RemoteAddr: p.server.at(off), RKey: p.server.mr.RKey()})
		}
		wrs = append(wrs, verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(i), Signaled: true})
		p.client.send(p.client.qp, wrs...)
	}
	seen := 0
	p.wait("all immediates", func() bool {
		for ; seen < len(p.server.wcs); seen++ {
			wc := p.server.wcs[seen]
			if wc.Status != verbs.StatusOK || wc.Imm != uint32(seen) {
				t.Fatalf("completion %d is %+v", seen, wc)
			}
			if i := filled(p.server.mem[seen*piece:][:piece], seen); i >= 0 {
				t.Fatalf("byte %d of write %d came after its immediate", i, seen)
			}
		}
		return seen == rounds
	})
}

func pipeline(t *testing.T, f Fabric) {
	const total, batch, piece = 10000, 16, 64
	p := newPair(t, f)
	for i := range queueDepth {
		p.server.recv(p.server.qp, uint64(i), 0, 0)
	}
	next, acked, got := 0, 0, 0 // sent, reported by the sender's queue, received
	wrs := make([]verbs.SendWR, batch)
	p.wait("ten thousand messages", func() bool {
		for _, wc := range p.server.wcs {
			if wc.Status != verbs.StatusOK || wc.Imm != uint32(got) {
				t.Fatalf("message %d arrived as %+v", got, wc)
			}
			off := got % queueDepth * piece
			if i := filled(p.server.mem[off:][:piece], got); i >= 0 {
				t.Fatalf("byte %d of message %d is wrong", i, got)
			}
			p.server.recv(p.server.qp, wc.ID, 0, 0)
			got++
		}
		for _, wc := range p.client.wcs {
			if wc.Status != verbs.StatusOK || wc.ID != uint64(acked+batch) {
				t.Fatalf("request %d completed as %+v", acked+batch, wc)
			}
			acked += batch
		}
		p.server.wcs, p.client.wcs = p.server.wcs[:0], p.client.wcs[:0]
		for next < total && next-got+batch <= queueDepth && next-acked+batch <= queueDepth {
			for i := range wrs {
				off := next % queueDepth * piece
				fill(p.client.mem[off:][:piece], next)
				wrs[i] = verbs.SendWR{ID: uint64(next + 1), Op: verbs.OpWriteImm, Signaled: i == batch-1, Imm: uint32(next),
					SGEs: p.client.sge(off, piece, 2), RemoteAddr: p.server.at(off), RKey: p.server.mr.RKey()}
				next++
			}
			p.client.send(p.client.qp, wrs...)
		}
		return got == total && acked == total
	})
}

// bothWays would stop for ever if an end did not receive while it sends.
func bothWays(t *testing.T, f Fabric) {
	p := newPair(t, f)
	const rounds, piece = 48, 256 << 10
	for _, e := range []*end{p.client, p.server} {
		fill(e.mem[:piece], len(e.dev.Info().Name))
		e.recv(e.qp, 99, memSize-8, 0)
	}
	write := func(from, to *end) {
		for range rounds {
			from.send(from.qp, verbs.SendWR{Op: verbs.OpWrite, Signaled: true, SGEs: from.sge(0, piece, 1), RemoteAddr: to.at(piece), RKey: to.mr.RKey()}) // signaled: progress is seen
		}
		from.send(from.qp, verbs.SendWR{ID: 1, Op: verbs.OpSend, Signaled: true})
	}
	write(p.client, p.server)
	write(p.server, p.client)
	for _, e := range []*end{p.client, p.server} {
		p.waitOK(e, 1)
		p.waitOK(e, 99)
	}
	for _, ends := range [][2]*end{{p.client, p.server}, {p.server, p.client}} {
		if i := filled(ends[1].mem[piece:][:piece], len(ends[0].dev.Info().Name)); i >= 0 {
			t.Errorf("byte %d is wrong", i)
		}
	}
}

func unsignalled(t *testing.T, f Fabric) {
	p := newPair(t, f)
	for i := range 4 {
		p.server.recv(p.server.qp, uint64(i), 64*i, 64)
	}
	for i := range 4 {
		p.client.send(p.client.qp, verbs.SendWR{ID: uint64(i), Op: verbs.OpSend, Signaled: i == 3, SGEs: p.client.sge(0, 10, 1)})
	}
	p.waitOK(p.server, 3)
	p.waitOK(p.client, 3)
	p.idle()
	if got := len(p.client.wcs); got != 1 {
		t.Errorf("%d completions, want that of the signalled request: %s", got, fmt.Sprint(p.client.wcs))
	}
}
