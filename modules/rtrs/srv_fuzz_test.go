package rtrs

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// Whatever one client writes into its chunks and announces, the server lives
// and another client is served.
func FuzzServerRequest(f *testing.F) {
	hdr := make([]byte, rtrswire.MaxReqHdrLen)
	n := rtrswire.PutReadDescHdr(hdr, 8, true, rtrswire.Desc{Addr: 0x7000_0000_0000, Key: 0x1fe, Len: 512})
	f.Add(hdr[:n], uint16(520), uint32(520), uint8(0), false)
	n = rtrswire.PutWriteHdr(hdr, 32)
	f.Add(hdr[:n], uint16(100), uint32(1<<25|100), uint8(1), true)
	n = rtrswire.PutFenceHdr(hdr, 16)
	f.Add(hdr[:n], uint16(16), uint32(16), uint8(0), true)
	f.Add([]byte{2, 0, 0xff, 0xff}, uint16(8188), uint32(8188), uint8(0), false)
	f.Add([]byte{}, uint16(0), uint32(0x80000000), uint8(0), true)
	f.Add([]byte{9}, uint16(1), uint32(0xffffffff), uint8(7), true)

	net := loopback.New()
	srv := startServer(f, net, serve)
	good := newRawPath(f, net, 2)
	good.src = otherAddr
	good.connect().info("good")
	f.Fuzz(func(t *testing.T, b []byte, off uint16, imm uint32, chunk uint8, cid1 bool) {
		good.t = t
		bad := newSession(t, net, 2, "bad")
		cid := 0
		if cid1 {
			cid = 1
		}
		room := max(0, bad.chunk-int(off)%bad.chunk)
		b = b[:min(len(b), room)]
		bad.put(cid, int(chunk)%8, int(off)%bad.chunk, b, rtrswire.Imm(imm))
		if imm>>28 == 0 { // and again, on the other connection, whatever became of the first
			bad.imm(1-cid, rtrswire.Imm(imm))
		}
		good.write(1, 3, b[:min(len(b), 64)], []byte("usr"))
		good.expect(answer{1, 3, 0, false})
		bad.pump()
		bad.hangUp()
		for end := time.Now().Add(10 * time.Second); len(srv.Sessions()) > 1; time.Sleep(50 * time.Microsecond) {
			if time.Now().After(end) {
				t.Fatal("the server does not let go of the bad session")
			}
		}
	})
}
