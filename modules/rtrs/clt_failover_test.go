package rtrs

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
)

// heldRequests are requests that scripted servers have not answered, in the
// order of arrival on all of them.
type heldRequests chan *scriptedRequest

// hold makes a server keep its requests; fences says whether it has FENCE.
func (h heldRequests) hold(fences bool) func(*scriptedServer) {
	return func(s *scriptedServer) {
		s.fences = fences
		s.onRequest = func(r *scriptedRequest) {
			r.user = append([]byte(nil), r.user...)
			r.data = append(make([]byte, 0, s.chunk), r.data...)
			h <- r
		}
	}
}

func (h heldRequests) next(t testing.TB) *scriptedRequest {
	t.Helper()
	select {
	case r := <-h:
		return r
	case <-time.After(10 * time.Second):
		t.Fatal("no request arrives")
		return nil
	}
}

// none checks that nothing arrives for a while.
func (h heldRequests) none(t testing.TB) {
	t.Helper()
	select {
	case r := <-h:
		t.Fatalf("request of type %d for buffer %d arrived", r.Type, r.buf)
	case <-time.After(50 * time.Millisecond):
	}
}

func (r *scriptedRequest) answer(errno int) { r.conn.srv.do(func() { r.respond(errno) }) }

// fenced is the path that a FENCE names.
func (r *scriptedRequest) fenced(t testing.TB) rtrswire.UUID {
	t.Helper()
	if r.Type != rtrswire.MsgFence || len(r.user) != 16 || len(r.data) != 0 || r.conn.req.CID != 0 {
		t.Fatalf("request of type %d with %d bytes of user message on connection %d, want a FENCE", r.Type, len(r.user), r.conn.req.CID)
	}
	return rtrswire.UUID(r.user)
}

func refuse(net *loopback.Network, s *scriptedServer) { net.RefuseDial(s.addr, syscall.ECONNREFUSED) }
func allow(net *loopback.Network, s *scriptedServer)  { net.RefuseDial(s.addr, nil) }

func TestR102_KernelServerGetsRequestsAgainAtOnce(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, _, net := cltTwoPaths(t, held.hold(false), nil)
	copy(c.region.Bytes(), "payload!")
	if err := c.write(0, 1, 0, 8, "first"); err != nil {
		t.Fatal(err)
	}
	lost := held.next(t)
	if lost.conn.srv != a {
		t.Fatal("the first request did not take the first path")
	}
	refuse(net, a)
	net.Cut(cltA, a.addr.Addr())
	again := held.next(t)
	if again.conn.srv == a || again.buf != lost.buf || string(again.user) != "first" || string(again.data) != "payload!" {
		t.Errorf("buffer %d, %q, %q was sent again, want %d", again.buf, again.user, again.data, lost.buf)
	}
	if again.conn.req.CID != lost.conn.req.CID {
		t.Errorf("it moved from connection %d to %d", lost.conn.req.CID, again.conn.req.CID)
	}
	again.answer(0)
	c.finished(1, 0)
	if n := c.Paths()[1].Stats.Failovers; n != 1 {
		t.Errorf("%d failovers counted", n)
	}
}

func TestFailedOverReadNamesTheMemoryOfItsNewDevice(t *testing.T) {
	held := make(heldRequests, 64)
	net := loopback.New()
	a := startScripted(t, net, srvA, held.hold(false))
	startScripted(t, net, srvB, held.hold(false))
	c := cltOpen(t, []PathAddr{pathTo(net.Device("one"), cltA, srvA), pathTo(net.Device("two"), cltB, srvB)}, nil)
	if err := c.read(1, 1, 64, 8, "u"); err != nil {
		t.Fatal(err)
	}
	first := held.next(t)
	refuse(net, a)
	net.Cut(cltA, a.addr.Addr())
	again := held.next(t)
	if again.Desc.Key == first.Desc.Key {
		t.Error("the key is that of the old device")
	}
	again.data = append(again.data[:0], "the data"...)
	again.answer(0)
	c.finished(1, 0)
	if got := string(c.region.Bytes()[64:72]); got != "the data" {
		t.Errorf("read %q", got)
	}
}

func TestFenceComesBeforeTheReplay(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, net := cltTwoPaths(t, held.hold(true), nil)
	if err := c.write(0, 1, 0, 8, "old"); err != nil {
		t.Fatal(err)
	}
	lost := held.next(t)
	pathA := lost.conn.req.SessUUID
	tap := tapNet(net, func(e loopback.Event) bool { return isConnect(e) && e.To == a.addr })
	net.Cut(cltA, a.addr.Addr())
	fence := held.next(t)
	if fence.conn.srv != b || fence.fenced(t) != pathA {
		t.Fatal("the FENCE does not name the lost path on the other one")
	}
	// The other path works meanwhile, the lost one does not reconnect: the
	// FENCE would close it.
	if err := c.write(0, 2, 0, 8, "new"); err != nil {
		t.Fatal(err)
	}
	held.next(t).answer(0)
	c.finished(2, 0)
	c.awaitState(1, PathReconnecting)
	held.none(t)
	if n := len(tap.all()); n != 0 {
		t.Errorf("%d attempts to connect while the FENCE is under way", n)
	}
	fence.answer(0)
	again := held.next(t)
	if again.buf != lost.buf || string(again.user) != "old" {
		t.Errorf("buffer %d, %q was sent again", again.buf, again.user)
	}
	again.answer(0)
	c.finished(1, 0)
	c.awaitState(1, PathConnected)
}

func TestFenceHasAPermitWhenAllOthersAreLost(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, net := cltTwoPaths(t, held.hold(true), func(cfg *ClientConfig) { cfg.Policy = MinLatency })
	c.links[0].hb.latency.Store(1)
	c.links[1].hb.latency.Store(1 << 60)
	sent := uint64(0)
	for ; c.write(int(sent%2), sent, 0, 8, "u") == nil; sent++ {
		if r := held.next(t); r.conn.srv != a {
			t.Fatal("a request took the other path")
		}
	}
	if sent != 7 {
		t.Fatalf("%d requests fit, want 7: one of 8 buffers is kept for a FENCE", sent)
	}
	refuse(net, a)
	net.Cut(cltA, a.addr.Addr())
	fence := held.next(t)
	fence.fenced(t)
	if fence.conn.srv != b {
		t.Error("the FENCE went on the lost path")
	}
	fence.answer(0)
	for range 7 {
		held.next(t).answer(0)
	}
	seen := map[uint64]bool{}
	for range 7 {
		d := c.next()
		seen[d.tag] = d.errno == 0
	}
	if len(seen) != 7 {
		t.Errorf("completions %v", seen)
	}
}

func TestTotalLoss_PermitsWaitForTheFences(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, net := cltTwoPaths(t, held.hold(true), nil)
	c.awaitKind(SessionUp)
	for tag := range uint64(4) { // two on each path
		if err := c.write(0, tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
		held.next(t)
	}
	pathB := b.last(0).req.SessUUID
	refuse(net, a)
	refuse(net, b)
	net.Cut(cltA, a.addr.Addr())
	held.next(t).fenced(t) // on path 2, lost now
	net.Cut(cltB, b.addr.Addr())
	for range 4 {
		if d := c.next(); d.errno != Lost {
			t.Errorf("errno %d, want Lost", d.errno)
		}
	}
	c.awaitKind(SessionDown)
	if n := c.slots.permits.inUse(); n != 5 {
		t.Errorf("%d permits are reserved, want those of 4 requests and the FENCE", n)
	}
	// Path 1 comes back. That it is accepted fences its last incarnation; path
	// 2 needs a FENCE before the session is up.
	allow(net, a)
	c.awaitState(1, PathConnected)
	fence := held.next(t)
	if fence.conn.srv != a || fence.fenced(t) != pathB {
		t.Error("the FENCE does not name path 2 on path 1")
	}
	if c.Connected() || c.write(0, 9, 0, 8, "u") != ErrDisconnected {
		t.Error("a request was taken before the FENCE was answered")
	}
	fence.answer(0)
	c.awaitKind(SessionUp)
	eventually(t, "all permits are back", func() bool { return c.slots.permits.inUse() == 1 }) // the spare
	if err := c.write(0, 10, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	held.next(t).answer(0)
	c.finished(10, 0)
	if len(c.done) != 0 {
		t.Errorf("request completed twice: %+v", <-c.done)
	}
}

func TestLossOfTheCarrierRepeatsTheFence(t *testing.T) {
	held := make(heldRequests, 64)
	net := loopback.New()
	var servers []*scriptedServer
	var paths []PathAddr
	dev := net.Device("client")
	for i, addr := range []string{srvA, srvB, "10.0.0.3:1234"} {
		servers = append(servers, startScripted(t, net, addr, func(s *scriptedServer) {
			held.hold(true)(s)
			s.depth = 16 // two spares
		}))
		paths = append(paths, pathTo(dev, addrOf([]string{"10.1.0.1:1", "10.1.0.2:1", "10.1.0.3:1"}[i]), addr))
	}
	c := cltOpen(t, paths, nil)
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	lost := held.next(t)
	for _, s := range servers[:2] {
		refuse(net, s)
	}
	net.Cut(paths[0].Src, servers[0].addr.Addr())
	first := held.next(t)
	if first.conn.srv != servers[1] || first.fenced(t) != lost.conn.req.SessUUID {
		t.Fatal("no FENCE on path 2")
	}
	net.Cut(paths[1].Src, servers[1].addr.Addr())
	want := map[rtrswire.UUID]bool{lost.conn.req.SessUUID: true, first.conn.req.SessUUID: true}
	var again *scriptedRequest
	for range 3 { // the write may overtake the second FENCE: that is for another path
		f := held.next(t)
		if f.Type != rtrswire.MsgFence {
			if again = f; want[lost.conn.req.SessUUID] {
				t.Error("the write came before the FENCE of its path was answered")
			}
			continue
		}
		if !want[f.fenced(t)] || f.conn.srv != servers[2] || f.buf == first.buf {
			t.Errorf("FENCE in buffer %d", f.buf)
		}
		delete(want, f.fenced(t))
		f.answer(0)
	}
	if len(want) != 0 || again == nil {
		t.Fatalf("FENCEs %v are missing, or the write: %v", want, again)
	}
	if again.buf != lost.buf || again.conn.srv != servers[2] {
		t.Errorf("buffer %d was sent again", again.buf)
	}
	again.answer(0)
	c.finished(1, 0)
}

// Requests of one path have all permits, and a FENCE that was lost with its carrier
// the one that is kept for FENCEs: the session does not wait for permits that need a
// FENCE to come back.
func TestFence_PermitsThatOnlyAFenceGivesBack(t *testing.T) {
	held := make(heldRequests, 64)
	c, servers, net := cltThreePaths(t, held)
	c.awaitKind(SessionUp)
	c.mu.Lock()
	name := c.uuid
	c.mu.Unlock()
	for i, s := range servers[:2] {
		refuse(net, s)
		net.Cut(c.Paths()[i].Addr.Src, s.addr.Addr())
		if i == 0 {
			held.next(t).fenced(t)
		}
	}
	c.awaitKind(SessionDown)
	c.awaitKind(SessionUp)
	held.none(t)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.uuid == name || len(c.lost) > 0 {
		t.Errorf("the session is not made anew: %d links wait for FENCEs", len(c.lost))
	}
}

// cltThreePaths is a client with requests that have all permits, on path 1; one
// permit is kept for a FENCE.
func cltThreePaths(t *testing.T, held heldRequests) (*cltClient, []*scriptedServer, *loopback.Network) {
	t.Helper()
	net := loopback.New()
	var servers []*scriptedServer
	var paths []PathAddr
	dev := net.Device("client")
	for i, addr := range []string{srvA, srvB, "10.0.0.3:1234"} {
		servers = append(servers, startScripted(t, net, addr, ofLife(1, held.hold(true))))
		paths = append(paths, pathTo(dev, addrOf([]string{"10.1.0.1:1", "10.1.0.2:1", "10.1.0.3:1"}[i]), addr))
	}
	c := cltOpen(t, paths, func(cfg *ClientConfig) { cfg.Policy = MinLatency })
	for i, l := range c.links {
		l.hb.latency.Store(1 << (10 * i))
	}
	for tag := range uint64(7) {
		if err := c.write(0, tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
		held.next(t)
	}
	return c, servers, net
}

func TestRefusedFenceGivesUpItsCarrier(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, _, net := cltTwoPaths(t, held.hold(true), nil)
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	held.next(t)
	refuse(net, a)
	net.Cut(cltA, a.addr.Addr())
	fence := held.next(t)
	fence.fenced(t)
	fence.answer(int(syscall.EINVAL))
	if e := c.awaitState(2, PathReconnecting); !errors.Is(e.Err, syscall.EINVAL) {
		t.Errorf("cause %v", e.Err)
	}
	c.finished(1, Lost)
}

func TestRemovedPathIsFencedToo(t *testing.T) {
	held := make(heldRequests, 64)
	c, _, _, _ := cltTwoPaths(t, held.hold(true), nil)
	if err := c.write(0, 1, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	lost := held.next(t)
	if err := c.RemovePath(cltContext(t), 1); err != nil {
		t.Fatal(err)
	}
	fence := held.next(t)
	if fence.fenced(t) != lost.conn.req.SessUUID {
		t.Error("the FENCE names another path")
	}
	fence.answer(0)
	held.next(t).answer(0)
	c.finished(1, 0)
}

func TestAdminRequestsFailOverToo(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, _, net := cltTwoPaths(t, held.hold(true), nil)
	result := make(chan error)
	reply := make([]byte, 4)
	go func() { result <- c.AdminRead(cltContext(t), []byte("u"), reply) }()
	held.next(t)
	net.Cut(cltA, a.addr.Addr())
	held.next(t).answer(0) // the FENCE
	again := held.next(t)
	again.data = append(again.data[:0], "good"...)
	again.answer(0)
	if err := <-result; err != nil || string(reply) != "good" {
		t.Errorf("%v, %q", err, reply)
	}
}

func TestAServerWithoutFencesTakesOverFromOneWith(t *testing.T) {
	held := make(heldRequests, 64)
	c, a, b, net := cltTwoPaths(t, held.hold(true), nil)
	for tag := range uint64(2) {
		if err := c.write(0, tag, 0, 8, "u"); err != nil {
			t.Fatal(err)
		}
		held.next(t)
	}
	a.close()
	b.close()
	for range 2 {
		if d := c.next(); d.errno != Lost {
			t.Errorf("errno %d", d.errno)
		}
	}
	c.awaitKind(SessionDown)
	held = make(heldRequests, 64)
	startScripted(t, net, srvA, held.hold(false))
	c.awaitKind(SessionUp)
	if err := c.write(0, 5, 0, 8, "u"); err != nil {
		t.Fatal(err)
	}
	r := held.next(t)
	if r.Type == rtrswire.MsgFence {
		t.Fatal("a FENCE for a server that does not know it")
	}
	r.answer(0)
	c.finished(5, 0)
}

// A send queue much smaller than the queue depth: requests without room wait,
// also after a failover.
func TestSmallSendQueue(t *testing.T) {
	net := loopback.New(loopback.WithLimits(16, 4))
	arrived := make(heldRequests, 256)
	edit := func(s *scriptedServer) {
		s.depth = 64
		s.onRequest = func(r *scriptedRequest) { arrived <- r }
		s.queue = 16
	}
	a := startScripted(t, net, srvA, edit)
	startScripted(t, net, srvB, edit)
	dev := net.Device("client")
	c := cltOpen(t, []PathAddr{pathTo(dev, cltA, srvA), pathTo(dev, cltB, srvB)}, nil)
	sent := 0
	for sent < 60 {
		switch err := c.write(0, uint64(sent), 0, 8, "u"); err {
		case nil:
			sent++
		case ErrNoPermit:
			select {
			case <-c.permit:
			case <-time.After(5 * time.Second):
				t.Fatalf("stuck after %d requests", sent)
			}
		default:
			t.Fatal(err)
		}
	}
	go func() {
		for {
			select {
			case r := <-arrived:
				r.respondWithRoom()
			case <-t.Context().Done():
				return
			}
		}
	}()
	net.Cut(cltA, a.addr.Addr())
	for range sent {
		if d := c.next(); d.errno != 0 {
			t.Errorf("tag %d: errno %d", d.tag, d.errno)
		}
	}
}
