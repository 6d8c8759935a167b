package rocev2

import (
	"fmt"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Both ends run in one goroutine: the figures are the work of both.
func BenchmarkWriteImm(b *testing.B) {
	for _, size := range []int{0, 4096, 128 << 10, 1 << 20} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			c, s := pairOf(b, Config{})
			src, lmr := c.region(size+1, 0)
			_, rmr := s.region(size+1, verbs.AccessRemoteWrite)
			wr := []verbs.SendWR{{Op: verbs.OpWriteImm, Signaled: true, RemoteAddr: rmr.Addr(), RKey: rmr.RKey(), SGEs: []verbs.SGE{{Buf: src[:size], LKey: lmr.LKey()}}}}
			recv := []verbs.RecvWR{{}}
			const depth = 16
			for range depth {
				s.recv(recv...)
			}
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			for posted, done, arrived := 0, 0, 0; done < b.N; {
				for posted < b.N && posted-done < depth && posted-arrived < depth {
					c.qp.PostSend(wr)
					posted++
				}
				done += c.cq.Poll(c.buf[:])
				for range s.cq.Poll(s.buf[:]) {
					s.qp.PostRecv(recv)
					arrived++
				}
			}
			if st := c.dev.Stats(); st.Resent > 0 {
				b.ReportMetric(float64(st.Resent)/float64(b.N), "resent/op")
			}
		})
	}
}
