package iwarp

import (
	"bytes"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A key that is made valid again while the region is closed does not bring the
// region back for the segment that is being placed.
func TestClosedRegionCannotBeRegisteredAgain(t *testing.T) {
	o := newOffline(t, bothTerms())
	buf, r := o.region(64, verbs.AccessRemoteWrite)
	b := segment{op: opWrite, stag: r.LKey(), to: r.Addr(), payload: bytes.Repeat([]byte{1}, 64)}.bytes(true)
	o.feed(b[:fpduTagged+8], len(b))
	r.Close()
	clear(buf)
	if res := o.pd.Validate(r.LKey()); res != softverbs.KeyUnknown {
		t.Errorf("its key is registered again: %s", res)
	}
	o.feed(b[fpduTagged+8:], len(b))
	if o.code() != termSTag || bytes.Count(buf, []byte{0}) != len(buf) {
		t.Errorf("terminated %s, the memory has %x", o.code(), buf)
	}
}

// Two regions may share memory. Work that names the other one goes on.
func TestClosedRegionEndsOnlyWorkThatNamesIt(t *testing.T) {
	for _, tt := range []struct {
		name string
		post func(e *end, buf []byte, lkey uint32)
		ends bool // where lkey is the closed region's
	}{
		{"a receive", func(e *end, buf []byte, lkey uint32) { e.recv(verbs.RecvWR{ID: 1, Buf: buf, LKey: lkey}) }, true},
		{"a receive of nothing", func(e *end, buf []byte, lkey uint32) { e.recv(verbs.RecvWR{ID: 1, Buf: buf[:0], LKey: lkey}) }, false},
		{"a read that waits for its answer", func(e *end, buf []byte, lkey uint32) {
			e.send(verbs.SendWR{ID: 1, Op: verbs.OpRead, SGEs: []verbs.SGE{{Buf: buf, LKey: lkey}}})
		}, true},
	} {
		for _, own := range []bool{true, false} {
			name := tt.name
			if !own {
				name += " into the other region of the same memory"
			}
			t.Run(name, func(t *testing.T) {
				c, s := pairOf(t, DefaultConfig())
				c.poll()
				s.poll()
				buf, closing := c.region(64, 0)
				staying, err := c.pd.RegMR(buf, 0)
				if err != nil {
					t.Fatal(err)
				}
				lkey := staying.LKey()
				if own {
					lkey = closing.LKey()
				}
				tt.post(c, buf, lkey)
				c.cq.Flush()
				if err := closing.Close(); err != nil {
					t.Fatal(err)
				}
				for range 10 {
					c.poll()
				}
				ended := len(c.wcs) > 0 && c.wcs[len(c.wcs)-1].Op == verbs.OpDisconnected
				if ended != (tt.ends && own) {
					t.Fatalf("connection ended: %v, completions %+v", ended, c.wcs)
				}
				if ended && c.wcs[len(c.wcs)-1].Status != verbs.StatusLocalProt {
					t.Errorf("the end is %+v", c.wcs[len(c.wcs)-1])
				}
				c.qp.Disconnect()
				for n := 0; c.pd.(*softverbs.Domain).Used(); n++ {
					if n > 100 {
						t.Fatal("the domain still counts a connection that is gone")
					}
					c.poll()
				}
			})
		}
	}
}

// Bytes that answer a read of the peer have no work request that names them.
func TestAnswerToAReadStopsWithItsRegion(t *testing.T) {
	c, s := pairOf(t, DefaultConfig())
	sink, lmr := c.region(8<<20, 0)
	src, rmr := s.region(8<<20, verbs.AccessRemoteRead)
	for i := range src {
		src[i] = 1
	}
	c.send(verbs.SendWR{ID: 1, Op: verbs.OpRead, Signaled: true, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: sink, LKey: lmr.LKey()}}})
	c.poll()
	for stop := time.Now().Add(testLimit); !s.q().tx.blocked; s.poll() { // the client does not read meanwhile
		if time.Now().After(stop) {
			t.Fatal("the socket took 8 MiB")
		}
	}
	if err := rmr.Close(); err != nil {
		t.Fatal(err)
	}
	for i := range src {
		src[i] = 2
	}
	if wc := c.next(s); wc.Status == verbs.StatusOK {
		t.Errorf("the read ended as %+v", wc)
	}
	if at := bytes.IndexByte(sink, 2); at >= 0 {
		t.Errorf("byte %d was sent after Close", at)
	}
}
