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

// BenchmarkCPU has both ends on one thread, so that no time is spent on waiting,
// and reports the CPU time of the thread. TLS is without a CRC below it.
func BenchmarkCPU(b *testing.B) {
	for _, size := range []int{4096, 16 << 10, 64 << 10, 128 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("size %d tls", size), func(b *testing.B) {
			c, s := protectedPair(b)
			benchCPU(b, c, s, size)
		})
		b.Run(fmt.Sprintf("size %d plain", size), func(b *testing.B) {
			c, s := pairOf(b, Config{CRC: true})
			benchCPU(b, c, s, size)
		})
	}
}

// benchCPU writes messages of size bytes, up to eight and 1 MiB under way.
func benchCPU(b *testing.B, c, s *end, size int) {
	depth := max(1, min(8, 1<<20/size))
	src, lmr := c.region(8<<20, 0)
	_, rmr := s.region(8<<20, verbs.AccessRemoteWrite)
	recv, wcs := []verbs.RecvWR{{}}, make([]verbs.WC, 64)
	for range 2 * depth {
		s.recv(recv...)
	}
	wr := []verbs.SendWR{{Op: verbs.OpWriteImm, RKey: rmr.RKey(), SGEs: []verbs.SGE{{LKey: lmr.LKey()}}}}
	write := func(n int) {
		for sent, got := 0, 0; got < n; {
			for ; sent < min(got+depth, n); sent++ {
				at := sent * size % len(src)
				wr[0].SGEs[0].Buf, wr[0].RemoteAddr = src[at:at+size], rmr.Addr()+uint64(at)
				c.qp.PostSend(wr)
			}
			c.cq.Poll(wcs)
			for range s.cq.Poll(wcs) {
				s.qp.PostRecv(recv)
				got++
			}
		}
	}
	b.SetBytes(int64(size))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	write(2 * len(src) / size) // buffers grow, pages come
	before := threadTime()
	b.ResetTimer()
	write(b.N)
	b.StopTimer()
	used := threadTime() - before
	b.ReportMetric(float64(used)/1e3/(float64(b.N)*float64(size)/(1<<20)), "cpu-us/MiB")
	c.qp.Disconnect()
}

// threadTime returns the CPU time of the thread in nanoseconds.
func threadTime() int64 {
	var u unix.Rusage
	unix.Getrusage(unix.RUSAGE_THREAD, &u)
	return u.Utime.Nano() + u.Stime.Nano()
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
