package rocev2

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// readable waits for a descriptor.
func readable(fd int, wait time.Duration) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, int(wait.Milliseconds()))
		if err != unix.EINTR {
			return n > 0
		}
	}
}

func TestC045_AllocFreeDataPath(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector allocates")
	}
	c, s := pairOf(t, Config{})
	const size = 20000
	src, lmr := c.region(size, 0)
	dst, rmr := s.region(size, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
	sges := []verbs.SGE{{Buf: src, LKey: lmr.LKey()}}
	key := rmr.RKey()
	wrs := []verbs.SendWR{
		{Op: verbs.OpWrite, SGEs: sges, RemoteAddr: rmr.Addr()},
		{Op: verbs.OpRead, SGEs: sges, RemoteAddr: rmr.Addr()},
		{Op: verbs.OpWriteImm, SGEs: sges, RemoteAddr: rmr.Addr()},
		{Op: verbs.OpSendImm, SGEs: sges, Signaled: true},
	}
	recvs := []verbs.RecvWR{{Buf: dst, LKey: rmr.LKey()}, {Buf: dst, LKey: rmr.LKey()}}
	rotate := []verbs.SendWR{{Op: verbs.OpLocalInv}, {Op: verbs.OpRegMR, Signaled: true}}
	poll := func(e *end, want int) {
		for got := 0; got < want; {
			got += e.cq.Poll(e.buf[:])
			if want == 0 || got < want {
				o := c
				if e == c {
					o = s
				}
				if o.cq.Poll(o.buf[:]) > 0 {
					t.Fatal("unexpected completion")
				}
			}
		}
	}
	round := func() {
		for i := range wrs {
			wrs[i].RKey = key
		}
		s.qp.PostRecv(recvs)
		c.qp.PostSend(wrs)
		for got, acked := 0, 0; got < 2 || acked < 1; {
			acked += c.cq.Poll(c.buf[:])
			got += s.cq.Poll(s.buf[:])
		}
		rotate[0].RKey, key = key, verbs.NextKey(key)
		rotate[1].RKey = key
		s.qp.PostSend(rotate)
		poll(s, 1)
		c.cq.Arm()
		s.cq.Arm()
	}
	for range 20 {
		round()
	}
	if n := testing.AllocsPerRun(200, round); n != 0 {
		t.Errorf("%v allocations a round", n)
	}
}
