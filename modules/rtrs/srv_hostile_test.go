package rtrs

import (
	"fmt"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Messages of a hostile client, before and after INFO, on each of its
// connections: the server lives, another client is served, and nothing is left
// of the hostile one after its end.

type hostileRequest struct {
	name string
	send func(p *rawPath, cid int)
}

// sendBytes is a SEND of n bytes that begin as given.
func sendBytes(op verbs.Opcode, n int, begin ...byte) hostileRequest {
	return hostileRequest{fmt.Sprintf("opcode %d with %d bytes, % x", op, n, begin), func(p *rawPath, cid int) {
		b := p.recvMem[4096:][:n]
		clear(b)
		copy(b, begin)
		p.post(cid, verbs.SendWR{Op: op, Imm: 0x10000001, RKey: 0x1234, SGEs: []verbs.SGE{{Buf: b, LKey: p.recvMR.LKey()}}})
	}}
}

func hostileRequests() (list []hostileRequest) {
	for _, n := range []int{0, 1, rtrswire.InfoReqLen - 1, rtrswire.InfoReqLen, rtrswire.InfoReqLen + 1} {
		list = append(list, sendBytes(verbs.OpSend, n), sendBytes(verbs.OpSend, n, 1), sendBytes(verbs.OpSendImm, n),
			sendBytes(verbs.OpSendInv, n), sendBytes(verbs.OpSend, n, 0, 0, '.', '/'))
	}
	for _, kind := range []uint32{0, 1, 2, 8, 9, 15} {
		for _, v := range []uint32{0, 1, 8191, 8192, 7<<25 | 8191, 1<<28 - 1} {
			imm := rtrswire.Imm(kind<<28 | v)
			list = append(list, hostileRequest{fmt.Sprintf("immediate %#08x", uint32(imm)), func(p *rawPath, cid int) { p.imm(cid, imm) }})
		}
	}
	return list
}

// hostileWrites are RDMA WRITEs to places that the client knows, or guesses.
func hostileWrites() (list []hostileRequest) {
	for _, w := range []struct {
		name     string
		off, n   int
		keyDelta uint32
	}{
		{"the whole chunk", 0, 8192, 0},
		{"one byte more than the chunk", 0, 8193, 0},
		{"behind the chunk", 8192, 8, 0},
		{"before the chunk", -8, 8, 0},
		{"the next key", 0, 8, 1},
		{"another region's key", 0, 8, 1 << 8},
	} {
		for _, imm := range []rtrswire.Imm{0, 1, 8191, 7<<25 | 8188, rtrswire.HeartbeatImm, 0xffffffff} {
			list = append(list, hostileRequest{fmt.Sprintf("WRITE to %s, immediate %#08x", w.name, uint32(imm)), func(p *rawPath, cid int) {
				to := p.bufs[len(p.bufs)-1]
				b := p.mem[:w.n]
				for i := range b {
					b[i] = byte(i * 7)
				}
				p.post(cid, verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(imm), RemoteAddr: to.addr + uint64(int64(w.off)), RKey: to.rkey + w.keyDelta,
					SGEs: []verbs.SGE{{Buf: b, LKey: p.mr.LKey()}}})
			}})
		}
	}
	return list
}

func TestHostileClient(t *testing.T) {
	for _, stage := range []struct {
		name   string
		stage  func(p *rawPath)
		things []hostileRequest
	}{
		{"before INFO, one connection missing", func(p *rawPath) { p.connect(0, 1) }, hostileRequests()},
		{"before INFO", func(p *rawPath) { p.connect() }, hostileRequests()},
		{"after INFO", func(p *rawPath) { p.connect().info("bad") }, append(hostileRequests(), hostileWrites()...)},
	} {
		t.Run(stage.name, func(t *testing.T) {
			both(t, func(t *testing.T, mode serverOption, _ bool) {
				net := loopback.New()
				s := startServer(t, net, serve, mode)
				good := newRawPath(t, net, 2)
				good.src = otherAddr
				good.connect().info("good")
				held := s.Usage()
				for i, thing := range stage.things {
					p := newRawPath(t, net, 3)
					stage.stage(p)
					for k := range 4 { // again, whatever became of the first
						thing.send(p, (i+k)%2)
					}
					p.pump()
					good.stillWorks()
					p.hangUp()
					for end := time.Now().Add(10 * time.Second); s.Usage() != held; time.Sleep(50 * time.Microsecond) {
						if time.Now().After(end) {
							t.Fatalf("%s: the server holds %+v, before it was %+v", thing.name, s.Usage(), held)
						}
					}
				}
			})
		})
	}
}
