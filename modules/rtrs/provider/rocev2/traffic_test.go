package rocev2

import (
	"bytes"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// traffic is the pattern of RTRS over one connection: the client writes a
// request into the chunk of a permit, with the data of a WRITE in front and an
// immediate that names the permit; the server answers with an immediate, after
// the data of a READ. As many requests are under way as there are permits.
type traffic struct {
	t        *testing.T
	c, s     *end
	size     int     // of a chunk, in bytes
	chunks   granted // at the server
	replies  granted // at the client: data to send and read data
	busy     []int   // number of the request of each permit, -1: free
	posted   int
	done     int
	requests int
}

// granted is memory that the other end may write to.
type granted struct {
	mem []byte
	mr  verbs.MR
}

func newTraffic(t *testing.T, c, s *end, permits, size, requests int) *traffic {
	x := &traffic{t: t, c: c, s: s, size: size, requests: requests, busy: make([]int, permits)}
	x.chunks.mem, x.chunks.mr = s.region(permits*size, verbs.AccessRemoteWrite)
	x.replies.mem, x.replies.mr = c.region(permits*size, verbs.AccessRemoteWrite)
	for i := range permits {
		x.busy[i] = -1
		c.recv(verbs.RecvWR{ID: uint64(i)})
		s.recv(verbs.RecvWR{ID: uint64(i)})
	}
	return x
}

func (x *traffic) chunk(of granted, permit, n int) []byte { return of.mem[permit*x.size:][:n] }

// length of the data of a request: a READ when the number is odd.
func (x *traffic) length(number int) int { return 64 + number*977%(x.size-64) }

// ask posts a request for each free permit.
func (x *traffic) ask() {
	for p := range x.busy {
		if x.busy[p] >= 0 || x.posted == x.requests {
			continue
		}
		n := x.length(x.posted)
		if x.posted%2 == 1 {
			n = 64 // the message alone
		}
		b := x.chunk(x.replies, p, n)
		copy(b, pattern(n, x.posted))
		x.c.send(verbs.SendWR{ID: uint64(p), Op: verbs.OpWriteImm, Imm: uint32(p), RemoteAddr: x.chunks.mr.Addr() + uint64(p*x.size), RKey: x.chunks.mr.RKey(),
			SGEs: []verbs.SGE{{Buf: b, LKey: x.replies.mr.LKey()}}, Signaled: p%8 == 0})
		x.busy[p] = x.posted
		x.posted++
	}
}

// serve answers the requests that came.
func (x *traffic) serve() {
	for _, wc := range x.s.wcs {
		if wc.Status != verbs.StatusOK {
			x.t.Fatalf("server, after %d requests: %+v", x.done, wc)
		}
		if wc.Op != verbs.OpRecvImm {
			continue
		}
		p := int(wc.Imm)
		number := x.busy[p]
		n := int(wc.ByteLen)
		if got := x.chunk(x.chunks, p, n); !bytes.Equal(got, pattern(n, number)) {
			x.t.Fatalf("request %d came with wrong bytes", number)
		}
		x.s.recv(verbs.RecvWR{ID: wc.ID})
		var wrs []verbs.SendWR
		if number%2 == 1 {
			b := x.chunk(x.chunks, p, x.length(number))
			copy(b, pattern(len(b), -number))
			wrs = append(wrs, verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: x.replies.mr.Addr() + uint64(p*x.size), RKey: x.replies.mr.RKey(),
				SGEs: []verbs.SGE{{Buf: b, LKey: x.chunks.mr.LKey()}}})
		}
		x.s.send(append(wrs, verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(p), Signaled: p%8 == 0})...)
	}
	x.s.wcs = x.s.wcs[:0]
}

// finish takes the answers.
func (x *traffic) finish() {
	for _, wc := range x.c.wcs {
		if wc.Status != verbs.StatusOK {
			x.t.Fatalf("client, after %d requests: %+v", x.done, wc)
		}
		if wc.Op != verbs.OpRecvImm {
			continue
		}
		p := int(wc.Imm)
		if number := x.busy[p]; number%2 == 1 {
			n := x.length(number)
			if !bytes.Equal(x.chunk(x.replies, p, n), pattern(n, -number)) {
				x.t.Fatalf("request %d was answered with wrong bytes", number)
			}
		}
		x.busy[p] = -1
		x.done++
		x.c.recv(verbs.RecvWR{ID: wc.ID})
	}
	x.c.wcs = x.c.wcs[:0]
}

// run does all requests and returns the longest time without an answer.
func (x *traffic) run(limit time.Duration) (longest time.Duration) {
	x.t.Helper()
	last := time.Now()
	for stop := last.Add(limit); x.done < x.requests; {
		before := x.done
		x.ask()
		idle := x.c.poll()+x.s.poll() == 0
		x.serve()
		x.finish()
		now := time.Now()
		if x.done > before {
			longest, last = max(longest, now.Sub(last)), now
		}
		if now.After(stop) {
			x.t.Fatalf("%d of %d requests in %s; %+v and %+v", x.done, x.requests, limit, x.c.dev.Stats(), x.s.dev.Stats())
		}
		if idle {
			time.Sleep(10 * time.Microsecond)
		}
	}
	return longest
}

// A connection lives with packets that are lost in both directions: nothing is
// given up, however many are.
func TestC052_RequestsAndAnswersWithLostPackets(t *testing.T) {
	for _, tt := range []struct {
		name     string
		loss     int // percent
		permits  int
		requests int
		cfg      Config
	}{
		{"1 %, one request at a time", 1, 1, 300, Config{}},
		{"1 %, 32 requests at a time", 1, 32, 1000, Config{}},
		{"2 %, 32 requests at a time", 2, 32, 1000, Config{}},
		{"2 %, 32 requests at a time, path MTU 1024", 2, 32, 500, Config{PathMTU: 1024}},
		{"10 %, 8 requests at a time", 10, 8, 200, Config{}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, s := pairOf(t, tt.cfg)
			badNetwork(c.dev, 11, tt.loss, 0, 0)
			badNetwork(s.dev, 12, tt.loss, 0, 0)
			begin := time.Now()
			longest := newTraffic(t, c, s, tt.permits, 16<<10, tt.requests).run(time.Minute)
			t.Logf("%d requests in %s, at most %s without an answer; client %+v, server %+v", tt.requests, time.Since(begin).Round(time.Millisecond), longest.Round(time.Millisecond), c.dev.Stats(), s.dev.Stats())
		})
	}
}
