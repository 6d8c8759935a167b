package softverbs

import (
	"errors"
	"slices"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

func newQP(t testing.TB, depth, first int) *QP {
	t.Helper()
	keys := &KeyTable{}
	keys.Init()
	q := &QP{Ops: 1<<verbs.OpSend | 1<<verbs.OpWrite, Longest: 100}
	q.Init(NewDomain(keys), &verbs.QPConfig{Context: 7, SendQueue: depth, RecvQueue: depth, MaxSGE: 2}, first)
	q.Set(Up)
	return q
}

func (q *QP) sge(t testing.TB, n int) verbs.SGE {
	t.Helper()
	mr, err := q.Domain.RegMR(make([]byte, n), 0)
	if err != nil {
		t.Fatal(err)
	}
	return verbs.SGE{Buf: mr.(*Region).buf, LKey: mr.LKey()}
}

func TestSendQueue_PostRefuses(t *testing.T) {
	q := newQP(t, 2, 2)
	in, foreign := q.sge(t, 101), newQP(t, 1, 1).sge(t, 8)
	for _, tt := range []struct {
		name string
		wr   verbs.SendWR
		want error
	}{
		{"an opcode that the connection does not carry", verbs.SendWR{Op: verbs.OpRead}, verbs.ErrUnsupported},
		{"an opcode that does not exist", verbs.SendWR{Op: 200}, verbs.ErrUnsupported},
		{"too many elements", verbs.SendWR{Op: verbs.OpSend, SGEs: make([]verbs.SGE, 3)}, errPostSGEs},
		{"memory of nobody", verbs.SendWR{Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: make([]byte, 1)}}}, verbs.ErrAccess},
		{"memory of another domain", verbs.SendWR{Op: verbs.OpSend, SGEs: []verbs.SGE{foreign}}, verbs.ErrAccess},
		{"a byte too many", verbs.SendWR{Op: verbs.OpSend, SGEs: []verbs.SGE{in}}, errPostLength},
	} {
		if n, err := q.Post([]verbs.SendWR{tt.wr}, 0); n != 0 || !errors.Is(err, tt.want) {
			t.Errorf("%s: %d taken, %v", tt.name, n, err)
		}
	}
	if n, err := q.Post(make3(verbs.OpSend), 0); n != 2 || !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("3 requests in a queue of 2: %d taken, %v", n, err)
	}
	if n, err := q.Post(make3(verbs.OpSend), 1); n != 1 || !errors.Is(err, verbs.ErrQueueFull) {
		t.Errorf("after one of them was done: %d taken, %v", n, err)
	}
}

func make3(op verbs.Opcode) []verbs.SendWR {
	wrs := make([]verbs.SendWR, 3)
	for i := range wrs {
		wrs[i] = verbs.SendWR{ID: uint64(i + 1), Op: op}
	}
	return wrs
}

func TestSendQueue_GrowsWithWhatIsInIt(t *testing.T) {
	q := newQP(t, 100, 4)
	var sges []verbs.SGE
	for i := range uint64(100) {
		s := q.sge(t, int(i%50)+1)
		sges = append(sges, s)
		if _, err := q.Post([]verbs.SendWR{{ID: i, Op: verbs.OpSend, Signaled: true, SGEs: []verbs.SGE{{}, s}}}, 0); err != nil {
			t.Fatal(err)
		}
		if i == 2 { // the oldest is not at the start of the ring then
			var one [1]verbs.WC
			q.Reap(one[:], 1)
		}
	}
	if q.SQ.Room() != 128 {
		t.Errorf("room for %d requests", q.SQ.Room())
	}
	for at := q.SQ.Head; at != q.SQ.Tail; at++ {
		own := q.SQ.Elements(at)
		if q.SQ.At(at).ID != at || len(own) != 2 || &own[1].Buf[0] != &sges[at].Buf[0] || len(own[1].Buf) != len(sges[at].Buf) {
			t.Fatalf("request %d is %+v with %d elements", at, *q.SQ.At(at), len(own))
		}
	}
}

func TestCursor_WalksTheElements(t *testing.T) {
	sges := []verbs.SGE{{}, {Buf: []byte("abc")}, {}, {Buf: []byte("defgh")}}
	var c Cursor
	var got []string
	for left := 8; left > 0; {
		b := c.Next(sges, min(left, 4))
		got = append(got, string(b))
		left -= len(b)
	}
	if want := []string{"abc", "defg", "h"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	for skip, want := range []string{"abc", "bc", "c", "defgh", "efgh"} {
		var c Cursor
		if c.Skip(sges, skip); string(c.Next(sges, 8)) != want {
			t.Errorf("after %d bytes not %q", skip, want)
		}
	}
}

func TestQP_CompletesEachRequestOnce(t *testing.T) {
	for _, tt := range []struct {
		name     string
		signaled []bool
		done     uint64
		status   []verbs.Status
		reaped   []uint64 // IDs
		flushed  []uint64
	}{
		{"nothing is done", []bool{true, false}, 0, nil, nil, []uint64{1, 2}},
		{"all are done", []bool{true, false, true}, 3, nil, []uint64{1, 3}, nil},
		{"one that is not signaled has failed", []bool{false, false, false}, 3, []verbs.Status{0, verbs.StatusLocalProt, 0}, []uint64{2}, nil},
		{"those behind the first are not", []bool{false, true, true}, 1, nil, nil, []uint64{2, 3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			q := newQP(t, 8, 8)
			for i, s := range tt.signaled {
				q.Post([]verbs.SendWR{{ID: uint64(i + 1), Op: verbs.OpSend, Signaled: s}}, 0)
				if tt.status != nil {
					q.SQ.At(uint64(i)).Status = tt.status[i]
				}
			}
			wcs := make([]verbs.WC, 10)
			n := q.Reap(wcs, tt.done)
			var got []uint64
			for _, wc := range wcs[:n] {
				got = append(got, wc.ID)
				if want := verbs.StatusOK; tt.status == nil && wc.Status != want {
					t.Errorf("%+v", wc)
				}
			}
			if !slices.Equal(got, tt.reaped) || q.SQ.Reapable(tt.done) {
				t.Errorf("reaped %v, want %v", got, tt.reaped)
			}
			q.End = End{State: EndFlushing, Code: 5, Status: verbs.StatusFatal}
			n, last := q.Flush(wcs, tt.done)
			if !last || n != len(tt.flushed)+1 || wcs[n-1].Op != verbs.OpDisconnected || wcs[n-1].Status != verbs.StatusFatal {
				t.Fatalf("flush returned %+v", wcs[:n])
			}
			for i, wc := range wcs[:n-1] {
				if wc.ID != tt.flushed[i] || wc.Status != verbs.StatusFlushed || wc.VendorCode != 5 || wc.QP != 7 {
					t.Errorf("flushed %+v, want ID %d", wc, tt.flushed[i])
				}
			}
			if n, last := q.Flush(wcs, tt.done); n != 0 || last {
				t.Errorf("a second flush returned %+v", wcs[:n])
			}
		})
	}
}

func TestQP_FlushGoesOnWhereTheCallerHasRoom(t *testing.T) {
	q := newQP(t, 4, 4)
	q.Post(make3(verbs.OpSend), 0)
	q.PostRecv([]verbs.RecvWR{{ID: 10}, {ID: 11}})
	q.RQ.Status = verbs.StatusLocalLength
	q.End.State = EndFlushing
	var all []verbs.WC
	for ended := false; !ended; {
		var one [1]verbs.WC
		n, last := q.Flush(one[:], 0)
		if ended = last; n != 1 {
			t.Fatalf("%d completions in room for 1 after %d", n, len(all))
		}
		all = append(all, one[0])
	}
	want := []verbs.WC{{ID: 1, Op: verbs.OpSend, Status: verbs.StatusFlushed}, {ID: 2, Op: verbs.OpSend, Status: verbs.StatusFlushed}, {ID: 3, Op: verbs.OpSend, Status: verbs.StatusFlushed},
		{ID: 10, Op: verbs.OpRecv, Status: verbs.StatusLocalLength}, {ID: 11, Op: verbs.OpRecv, Status: verbs.StatusFlushed}, {Op: verbs.OpDisconnected}}
	for i := range want {
		want[i].QP = 7
	}
	if !slices.Equal(all, want) {
		t.Errorf("completions %+v", all)
	}
}

func TestQP_PhasesDecideWhoIsTold(t *testing.T) {
	for _, tt := range []struct {
		phase               Phase
		disconnect, destroy bool // the owner is told
	}{{Idle, false, false}, {Connecting, true, false}, {Up, true, true}, {Down, true, true}} {
		q := newQP(t, 1, 1)
		q.Set(tt.phase)
		if got := q.AskDisconnect(); got != tt.disconnect {
			t.Errorf("phase %d: disconnect told: %t", tt.phase, got)
		}
		if q.AskDisconnect() {
			t.Errorf("phase %d: told twice", tt.phase)
		}
		if got := q.AskDestroy(); got != tt.destroy || !q.Destroyed() || !got && !q.Is(Down) {
			t.Errorf("phase %d: destroy told: %t", tt.phase, got)
		}
	}
}

func TestDataPath_AllocatesNothing(t *testing.T) {
	q := newQP(t, 16, 16)
	s := q.sge(t, 64)
	wrs := []verbs.SendWR{{Op: verbs.OpSend, Signaled: true, SGEs: []verbs.SGE{s}}, {Op: verbs.OpWrite, SGEs: []verbs.SGE{s}}}
	recvs := []verbs.RecvWR{{Buf: s.Buf, LKey: s.LKey}}
	var ready Ready[*QP]
	wcs := make([]verbs.WC, 4)
	round := func() {
		q.Post(wrs, q.SQ.Tail)
		q.PostRecv(recvs)
		var c Cursor
		c.Next(q.SQ.Elements(q.SQ.Head), 64)
		ready.Add(q, &q.Listed)
		for ready.More() {
			ready.Next().Reap(wcs, q.SQ.Tail)
			ready.Keep(&q.Listed, false)
		}
		ready.EndRound()
		q.RQ.Take()
	}
	round()
	if n := testing.AllocsPerRun(100, round); n != 0 {
		t.Errorf("%v allocations a round", n)
	}
}
