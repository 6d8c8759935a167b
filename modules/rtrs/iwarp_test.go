package rtrs

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Both ends over TCP sockets. The loopback fabric cannot show that the rules
// of receives, credits and keys hold when bytes take their time.

func openIwarp(t testing.TB) verbs.Device {
	t.Helper()
	cfg := iwarp.DefaultConfig()
	cfg.Logger = slog.New(slog.DiscardHandler)
	dev, err := iwarp.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Errorf("close device: %v", err)
		}
	})
	return dev
}

// ramDisk keeps written data; the user message is the offset.
type ramDisk struct {
	mu  sync.Mutex
	mem []byte
}

func (d *ramDisk) request(op *Op) {
	off := binary.LittleEndian.Uint64(op.User())
	d.mu.Lock()
	if op.IsRead() {
		copy(op.Data(), d.mem[off:])
	} else {
		copy(d.mem[off:], op.Data())
	}
	d.mu.Unlock()
	op.Respond(0)
}

const iwarpArea = 128 << 10 // bytes of the disk and of the region per slot

func TestOverIwarp_WritesAndReadsWhilePathsComeAndGo(t *testing.T) {
	both(t, func(t *testing.T, mode serverOption, _ bool) {
		const queues, slots, rounds = 2, 4, 40
		disk := &ramDisk{mem: make([]byte, queues*slots*iwarpArea)}
		dev := openIwarp(t)
		srv := startServer(t, loopback.New(), disk.request, mode, depth(queues*slots+1), func(c *ServerConfig) { c.ChunkSize = iwarpArea + maxHdrSize })
		var paths []PathAddr
		for i := range 2 {
			addr := netip.MustParseAddr(fmt.Sprintf("127.0.0.%d", i+1))
			at, err := srv.Listen(dev, netip.AddrPortFrom(addr, 0))
			if err != nil {
				t.Fatal(err)
			}
			paths = append(paths, PathAddr{Device: openIwarp(t), Dst: at})
		}
		l := &iwarpLoad{t: t, done: make([]chan cltDone, queues)}
		for i := range l.done {
			l.done[i] = make(chan cltDone, slots)
		}
		s, err := Open(t.Context(), "s", paths, ClientConfig{
			Pollers: startPollers(t, queues),
			Logger:  srv.log,
			OnDone:  func(q int, tag uint64, errno int) { l.done[q] <- cltDone{queue: q, tag: tag, errno: errno} },
		})
		if err != nil {
			t.Fatal(err)
		}
		l.start(s, slots)
		t.Cleanup(func() { _ = s.Close(context.Background()) })
		var wg sync.WaitGroup
		for q := range queues {
			wg.Go(func() { l.run(q, slots, rounds) })
		}
		for _, addr := range paths { // each is lost once while the other carries on
			time.Sleep(20 * time.Millisecond)
			old := pathAt(srv, addr.Dst.Addr())
			if err := srv.DisconnectPath("s", old.ID); err != nil {
				t.Error(err)
			}
			eventually(t, "the path to be back at both ends", func() bool {
				p := pathAt(srv, addr.Dst.Addr())
				return p.ID != old.ID && p.State == SrvPathConnected && allConnected(s)
			})
		}
		wg.Wait()
	})
}

// pathAt returns the server's path at its own address addr.
func pathAt(srv *testServer, addr netip.Addr) (found SrvPathInfo) {
	for _, p := range srv.Sessions()[0].Paths() {
		if p.Server.Addr() == addr {
			found = p
		}
	}
	return found
}

func allConnected(s *Session) bool {
	for _, p := range s.Paths() {
		if p.State != PathConnected {
			return false
		}
	}
	return true
}

// iwarpLoad writes and reads areas of the disk, one per queue and slot.
type iwarpLoad struct {
	t      testing.TB
	s      *Session
	mem    []byte
	region *Region
	done   []chan cltDone
}

func (l *iwarpLoad) start(s *Session, slots int) {
	l.s, l.mem = s, make([]byte, len(l.done)*slots*iwarpArea)
	var err error
	if l.region, err = s.Register(l.mem); err != nil {
		l.t.Fatal(err)
	}
}

// run does rounds of: write all slots of queue q, read them back, compare.
func (l *iwarpLoad) run(q, slots, rounds int) {
	sizes := []int{1, 512, 4096, 5000, 65536, iwarpArea}
	for round := range rounds {
		size, want := sizes[rand.IntN(len(sizes))], make([][]byte, slots)
		for i := range want {
			want[i] = bytes.Repeat([]byte{byte(round), byte(q), byte(i), byte(rand.Uint32())}, size/4+1)[:size]
			copy(l.slot(q, slots, i), want[i])
		}
		l.all(q, slots, size, l.s.Queue(q).Write)
		for i := range want {
			clear(l.slot(q, slots, i)[:size])
		}
		l.all(q, slots, size, l.s.Queue(q).Read)
		for i := range want {
			if !bytes.Equal(l.slot(q, slots, i)[:size], want[i]) {
				l.t.Errorf("queue %d round %d slot %d: %d bytes differ from what was written", q, round, i, size)
			}
		}
	}
}

func (l *iwarpLoad) slot(q, slots, i int) []byte {
	return l.mem[(q*slots+i)*iwarpArea:][:iwarpArea]
}

// all submits one request per slot and waits for all of them.
func (l *iwarpLoad) all(q, slots, size int, submit func(uint64, Data, []byte) error) {
	err := l.s.Queue(q).poller.Call(l.t.Context(), func() {
		for i := range slots {
			off := (q*slots + i) * iwarpArea
			user := binary.LittleEndian.AppendUint64(nil, uint64(off))
			if err := submit(uint64(i), Data{Region: l.region, Off: off, Len: size}, user); err != nil {
				l.t.Errorf("queue %d slot %d: %v", q, i, err)
				l.done[q] <- cltDone{queue: q, tag: uint64(i)}
			}
		}
	})
	if err != nil {
		l.t.Error(err)
		return
	}
	for range slots {
		select {
		case d := <-l.done[q]:
			if d.errno != 0 {
				l.t.Errorf("queue %d slot %d: errno %d", q, d.tag, d.errno)
			}
		case <-time.After(10 * time.Second):
			l.t.Errorf("queue %d: no completion", q)
			return
		}
	}
}
