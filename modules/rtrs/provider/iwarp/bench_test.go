package iwarp

import (
	"fmt"
	"runtime"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// BenchmarkWriteImm keeps depth writes with an immediate under way; the other
// end answers each with an immediate. Each end is a thread that yields.
func BenchmarkWriteImm(b *testing.B) {
	for _, size := range []int{4096, 128 << 10} {
		for _, depth := range []int{1, 32} {
			for _, crc := range []bool{true, false} {
				b.Run(fmt.Sprintf("size %d depth %d crc %v", size, depth, crc), func(b *testing.B) {
					benchWriteImm(b, Config{CRC: crc}, size, depth)
				})
			}
		}
	}
}

// BenchmarkWriteImmTLS is the same under TLS, without a CRC below it.
func BenchmarkWriteImmTLS(b *testing.B) {
	for _, size := range []int{4096, 128 << 10, 1 << 20} {
		for _, depth := range []int{1, 8} {
			b.Run(fmt.Sprintf("size %d depth %d tls", size, depth), func(b *testing.B) {
				c, s := protectedPair(b)
				benchPair(b, c, s, size, depth)
			})
			b.Run(fmt.Sprintf("size %d depth %d crc", size, depth), func(b *testing.B) {
				benchWriteImm(b, Config{CRC: true}, size, depth)
			})
		}
	}
}

func benchWriteImm(b *testing.B, cfg Config, size, depth int) {
	c, s := pairOf(b, cfg)
	benchPair(b, c, s, size, depth)
}

func benchPair(b *testing.B, c, s *end, size, depth int) {
	src, lmr := c.region(size*depth, 0)
	_, rmr := s.region(size*depth, verbs.AccessRemoteWrite)
	stop := make(chan struct{})
	var owner sync.WaitGroup
	recv, answer := []verbs.RecvWR{{}}, []verbs.SendWR{{Op: verbs.OpWriteImm}}
	for range 2 * depth {
		s.recv(recv...)
		c.recv(recv...)
	}
	owner.Go(func() {
		runtime.LockOSThread()
		wcs := make([]verbs.WC, 64)
		for {
			n := s.cq.Poll(wcs)
			for _, wc := range wcs[:n] {
				if wc.Op == verbs.OpRecvImm {
					s.qp.PostRecv(recv)
					s.qp.PostSend(answer)
				}
			}
			if n == 0 {
				select {
				case <-stop:
					return
				default:
					unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
				}
			}
		}
	})
	wrs := make([]verbs.SendWR, depth)
	for i := range wrs {
		wrs[i] = verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(i), RemoteAddr: rmr.Addr() + uint64(i*size), RKey: rmr.RKey(),
			SGEs: []verbs.SGE{{Buf: src[i*size:][:size], LKey: lmr.LKey()}}}
	}
	b.SetBytes(int64(size))
	b.ReportAllocs()
	b.ResetTimer()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	wcs := make([]verbs.WC, 64)
	sent, got := 0, 0
	for ; sent < min(depth, b.N); sent++ {
		c.qp.PostSend(wrs[sent : sent+1])
	}
	for got < b.N {
		n := c.cq.Poll(wcs)
		for _, wc := range wcs[:n] {
			if wc.Op != verbs.OpRecvImm {
				continue
			}
			c.qp.PostRecv(recv)
			if got++; sent < b.N {
				at := sent % depth
				c.qp.PostSend(wrs[at : at+1])
				sent++
			}
		}
		if n == 0 {
			unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
		}
	}
	b.StopTimer()
	close(stop)
	owner.Wait() // the queue is the test's again
	c.qp.Disconnect()
}
