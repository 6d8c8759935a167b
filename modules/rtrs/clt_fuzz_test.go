package rtrs

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// An INFO_RSP that passes the checks gives every buffer one place, in an
// announced region.
func FuzzInfoRspTable(f *testing.F) {
	good := rtrswire.InfoRsp(make([]byte, rtrswire.InfoRspLen(2)))
	good.PutHeader(2)
	good.PutDesc(0, rtrswire.Desc{Addr: 0x1000, Key: 7, Len: 3 * 8192})
	good.PutDesc(1, rtrswire.Desc{Addr: 1<<64 - 8192, Key: 9, Len: 8192})
	f.Add([]byte(good), uint16(4), uint32(8192))
	f.Add([]byte(good[:8]), uint16(4), uint32(8192))
	f.Fuzz(func(t *testing.T, b []byte, depth uint16, chunk uint32) {
		p := &path{}
		lp := linkParams{queueDepth: int(depth), chunkSize: int(chunk), maxIOSize: int(chunk), maxHdrSize: 4096}
		if p.checkParams(&lp) != nil {
			return
		}
		l := &link{linkParams: lp}
		if l.takeInfoRsp(b) != nil {
			return
		}
		if len(l.bufs) != int(depth) {
			t.Fatalf("%d places for %d buffers", len(l.bufs), depth)
		}
		i := 0
		for r := range rtrswire.InfoRsp(b).Count() {
			d := rtrswire.InfoRsp(b).Desc(r)
			for k := range uint64(d.Len / chunk) {
				if want := (remoteBuf{d.Addr + k*uint64(chunk), d.Key}); l.bufs[i] != want {
					t.Fatalf("buffer %d is at %+v, want %+v", i, l.bufs[i], want)
				}
				i++
			}
		}
	})
}
