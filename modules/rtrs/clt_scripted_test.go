package rtrs

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// scriptedServer speaks just enough of the server's side, straight over verbs,
// and follows the script of a test, right or wrong. One goroutine owns its
// queues.
type scriptedServer struct {
	t    testing.TB
	net  *loopback.Network
	addr netip.AddrPort

	depth, chunk int
	newRkey      bool
	fences       bool
	incarnation  byte
	infoReq      int // bytes of the receive of the INFO_REQ
	regions      int // in INFO_RSP
	queue        int // of each queue pair

	// Hooks; nil does the right thing. They run on the server's goroutines.
	onConnect func(req rtrswire.ConnReqFields, rsp []byte) (reply []byte, errno int)
	onInfo    func(rsp []byte) []byte // nil result: no answer
	onRequest func(r *scriptedRequest)
	onImm     func(c *scriptedConn, imm rtrswire.Imm) // instead of onRequest
	onHB      func(c *scriptedConn) bool              // false: do not answer

	dev   verbs.Device
	pd    verbs.PD
	cq    verbs.CQ
	lis   verbs.Listener
	mem   []byte
	mrs   []verbs.MR
	sends []byte
	send  verbs.MR
	todo  chan func()
	stop  chan struct{}
	done  sync.WaitGroup

	mu    sync.Mutex
	conns []*scriptedConn
	hbs   int // HB_MSG received
	acks  int // HB_ACK received
	infos [][]byte
}

type scriptedConn struct {
	srv  *scriptedServer
	qp   verbs.QP
	req  rtrswire.ConnReqFields
	info []byte
	down bool
	wrs  [1]verbs.SendWR
	sges [1]verbs.SGE

	flying int // of post, not completed; of the owner
}

// answerWithoutMemory answers a request and allocates nothing.
func answerWithoutMemory(c *scriptedConn, imm rtrswire.Imm) {
	s := c.srv
	buf, off := imm.IOReq(rtrswire.BufShift(s.depth))
	req, _ := rtrswire.ParseRequest(s.mem[buf*s.chunk:][off:s.chunk])
	if req.HasDesc {
		c.sges[0] = verbs.SGE{Buf: s.sends[:req.Desc.Len], LKey: s.send.LKey()}
		c.wrs[0] = verbs.SendWR{Op: verbs.OpWrite, Signaled: true, SGEs: c.sges[:], RemoteAddr: req.Desc.Addr, RKey: req.Desc.Key}
		_, _ = c.qp.PostSend(c.wrs[:])
	}
	c.wrs[0] = verbs.SendWR{Op: verbs.OpWriteImm, Signaled: true, Imm: uint32(rtrswire.IORspImm(false, 0, buf))}
	_, _ = c.qp.PostSend(c.wrs[:])
}

// scriptedRequest is a decoded request.
type scriptedRequest struct {
	conn     *scriptedConn
	buf, off int
	rtrswire.Request
	user []byte
	data []byte // the chunk up to the user message
}

var oneRecv [1]verbs.RecvWR

const (
	scriptedInfoID = 1 << 20
	scriptedHdr    = 4096
)

// startScripted runs a server of 8 chunks of 8 KiB; edit changes it first.
func startScripted(t testing.TB, net *loopback.Network, addr string, edit func(*scriptedServer)) *scriptedServer {
	t.Helper()
	s := &scriptedServer{
		t: t, net: net, addr: netip.MustParseAddrPort(addr), depth: 8, chunk: 8192, infoReq: rtrswire.InfoReqLen, regions: 1, queue: 4096,
		todo: make(chan func(), 64), stop: make(chan struct{}),
	}
	if edit != nil {
		edit(s)
	}
	var err error
	s.dev = net.Device("scripted")
	s.must(err)
	s.pd, err = s.dev.AllocPD()
	s.must(err)
	s.cq, err = s.dev.CreateCQ(1024)
	s.must(err)
	s.register()
	s.lis, err = s.dev.Listen(s.addr)
	s.must(err)
	s.done.Go(s.poll)
	s.done.Go(s.accept)
	t.Cleanup(s.close)
	return s
}

func (s *scriptedServer) must(err error) {
	if err != nil {
		s.t.Helper()
		s.t.Fatal(err)
	}
}

func (s *scriptedServer) register() {
	s.mem = make([]byte, s.depth*s.chunk)
	s.sends = make([]byte, 1<<20)
	var err error
	s.send, err = s.pd.RegMR(s.sends, 0)
	s.must(err)
	n := len(s.mem) / s.regions
	for i := range s.regions {
		mr, err := s.pd.RegMR(s.mem[i*n:(i+1)*n], verbs.AccessRemoteWrite)
		s.must(err)
		s.mrs = append(s.mrs, mr)
	}
}

func (s *scriptedServer) close() {
	select {
	case <-s.stop:
		return
	default:
	}
	_ = s.lis.Close()
	s.hangUp()
	close(s.stop)
	s.done.Wait()
}

// hangUp ends all connections.
func (s *scriptedServer) hangUp() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		c.qp.Disconnect()
	}
}

// do runs f on the goroutine that owns the queues, and waits.
func (s *scriptedServer) do(f func()) {
	done := make(chan struct{})
	s.todo <- func() { f(); close(done) }
	<-done
}

func (s *scriptedServer) poll() {
	var wcs [32]verbs.WC
	for {
		n := s.cq.Poll(wcs[:])
		for i := range n {
			s.complete(&wcs[i])
		}
		select {
		case f := <-s.todo:
			f()
		case <-s.stop:
			s.cq.Poll(wcs[:])
			return
		default:
			if n == 0 {
				time.Sleep(50 * time.Microsecond)
			}
		}
	}
}

func (s *scriptedServer) accept() {
	for {
		r, err := s.lis.Accept()
		if err != nil {
			return
		}
		s.answer(r)
	}
}

func (s *scriptedServer) answer(r verbs.ConnRequest) {
	req := rtrswire.ConnReq(r.Private()).Fields()
	rsp := make([]byte, rtrswire.ConnRspLen)
	f := rtrswire.ConnRspFields{QueueDepth: uint16(s.depth), MaxIOSize: uint32(s.chunk - scriptedHdr), MaxHdrSize: scriptedHdr}
	if s.newRkey {
		f.Flags = rtrswire.FlagNewRkey
	}
	if s.fences {
		f.Features = rtrswire.FeatureFence
	}
	if s.incarnation != 0 {
		f.Features |= rtrswire.FeatureIncarnation
		f.Incarnation[0] = s.incarnation
	}
	rtrswire.ConnRsp(rsp).Put(&f)
	if s.onConnect != nil {
		var errno int
		if rsp, errno = s.onConnect(req, rsp); errno != 0 {
			f := rtrswire.ConnRspFields{Errno: int16(-errno)}
			rsp = make([]byte, rtrswire.ConnRspLen)
			rtrswire.ConnRsp(rsp).Put(&f)
		}
		if errno != 0 || rsp == nil {
			_ = r.Reject(rsp)
			return
		}
	}
	s.join(r, req, rsp)
}

func (s *scriptedServer) join(r verbs.ConnRequest, req rtrswire.ConnReqFields, rsp []byte) {
	c := &scriptedConn{srv: s, req: req}
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := uint64(len(s.conns))
	qp, err := s.dev.CreateQP(s.pd, verbs.QPConfig{CQ: s.cq, Context: slot, SendQueue: s.queue, RecvQueue: s.queue, MaxSGE: 2})
	s.must(err)
	c.qp = qp
	s.conns = append(s.conns, c)
	var recvs []verbs.RecvWR
	if req.CID == 0 {
		c.info = make([]byte, s.infoReq)
		mr, err := s.pd.RegMR(c.info, 0)
		s.must(err)
		recvs = append(recvs, verbs.RecvWR{ID: scriptedInfoID, Buf: c.info, LKey: mr.LKey()})
	}
	for range min(max(s.depth, 64), s.queue-1) {
		recvs = append(recvs, verbs.RecvWR{})
	}
	_, err = qp.PostRecv(recvs)
	s.must(err)
	_ = r.Accept(qp, rsp) // the client may have gone
}

func (s *scriptedServer) conn(slot uint64) *scriptedConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns[slot]
}

func (s *scriptedServer) complete(wc *verbs.WC) {
	c := s.conn(wc.QP)
	switch {
	case wc.Op == verbs.OpDisconnected:
		c.down = true
	case wc.Op != verbs.OpRecv && wc.Op != verbs.OpRecvImm:
		c.flying--
	case wc.Status != verbs.StatusOK:
	case wc.ID == scriptedInfoID:
		s.sendInfo(c)
	default:
		_, _ = c.qp.PostRecv(oneRecv[:])
		s.imm(c, rtrswire.Imm(wc.Imm))
	}
}

// sendInfo answers the INFO_REQ.
func (s *scriptedServer) sendInfo(c *scriptedConn) {
	s.mu.Lock()
	s.infos = append(s.infos, c.info)
	s.mu.Unlock()
	rsp := rtrswire.InfoRsp(make([]byte, rtrswire.InfoRspLen(len(s.mrs))))
	rsp.PutHeader(len(s.mrs))
	for i, mr := range s.mrs {
		rsp.PutDesc(i, rtrswire.Desc{Addr: mr.Addr(), Key: mr.RKey(), Len: uint32(mr.Len())})
	}
	if s.onInfo != nil {
		if rsp = s.onInfo(rsp); rsp == nil {
			return
		}
	}
	c.post(verbs.SendWR{Op: verbs.OpSend}, rsp)
}

func (s *scriptedServer) imm(c *scriptedConn, imm rtrswire.Imm) {
	switch imm.Type() {
	case rtrswire.ImmIOReq:
		s.request(c, imm)
	case rtrswire.ImmHeartbeat:
		s.mu.Lock()
		s.hbs++
		s.mu.Unlock()
		if s.onHB == nil || s.onHB(c) {
			c.imm(rtrswire.HeartbeatAckImm)
		}
	case rtrswire.ImmHeartbeatAck:
		s.mu.Lock()
		s.acks++
		s.mu.Unlock()
	}
}

func (s *scriptedServer) request(c *scriptedConn, imm rtrswire.Imm) {
	if s.onImm != nil {
		s.onImm(c, imm)
		return
	}
	buf, off := imm.IOReq(rtrswire.BufShift(s.depth))
	chunk := s.mem[buf*s.chunk:][:s.chunk]
	req, err := rtrswire.ParseRequest(chunk[off:])
	if err != nil {
		s.t.Errorf("scripted server: chunk %d offset %d: %v", buf, off, err)
		return
	}
	r := &scriptedRequest{conn: c, buf: buf, off: off, Request: req, data: chunk[:off-req.UsrLen], user: chunk[off-req.UsrLen : off]}
	if s.onRequest != nil {
		s.onRequest(r)
		return
	}
	r.respond(0)
}

// respond answers as a server should. Owner of the queues.
func (r *scriptedRequest) respond(errno int) {
	if r.HasDesc && errno == 0 {
		r.conn.post(verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: r.Desc.Addr, RKey: r.Desc.Key}, r.data[:r.Desc.Len])
	}
	imm := rtrswire.IORspImm(false, errno, r.buf)
	if !r.conn.srv.newRkey {
		r.conn.imm(imm)
		return
	}
	r.conn.rkeyRsp(imm, r.buf, r.conn.srv.rkey(r.buf))
}

// respondWithRoom responds when the client has taken enough of the answers before.
func (r *scriptedRequest) respondWithRoom() {
	for answered := false; !answered; time.Sleep(100 * time.Microsecond) {
		r.conn.srv.do(func() {
			if answered = r.conn.down || r.conn.flying < r.conn.srv.queue-2; answered {
				r.respond(0)
			}
		})
	}
}

// rkey is the key of a chunk.
func (s *scriptedServer) rkey(buf int) uint32 { return s.mrs[buf*s.regions/s.depth].RKey() }

func (c *scriptedConn) rkeyRsp(imm rtrswire.Imm, buf int, rkey uint32) {
	var msg [rtrswire.RkeyRspLen]byte
	rtrswire.RkeyRsp(msg[:]).Put(buf, rkey)
	c.post(verbs.SendWR{Op: verbs.OpSendImm, Imm: uint32(imm)}, msg[:])
}

func (c *scriptedConn) imm(imm rtrswire.Imm) {
	c.post(verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(imm), RKey: 0xdeadbeef, RemoteAddr: 0xabad1dea}, nil)
}

// post sends a copy of payload. Owner of the queues.
func (c *scriptedConn) post(wr verbs.SendWR, payload []byte) {
	s := c.srv
	if len(payload) > 0 {
		mem := append([]byte(nil), payload...)
		mr, err := s.pd.RegMR(mem, 0)
		s.must(err)
		wr.SGEs = []verbs.SGE{{Buf: mem, LKey: mr.LKey()}}
	}
	wr.Signaled = true
	switch _, err := c.qp.PostSend([]verbs.SendWR{wr}); {
	case err == nil:
		c.flying++
	case !c.down && !errors.Is(err, verbs.ErrNotConnected):
		s.t.Errorf("scripted server: post: %v", err)
	}
}

// last is the newest connection cid.
func (s *scriptedServer) last(cid int) *scriptedConn {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(s.conns) - 1; i >= 0; i-- {
		if int(s.conns[i].req.CID) == cid {
			return s.conns[i]
		}
	}
	s.t.Fatalf("no connection %d", cid)
	return nil
}

func (s *scriptedServer) count(n *int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *n
}

// Things that the client tests share.

// cltClient is a session under test with its pollers, completions and events.
type cltClient struct {
	*Session
	t       testing.TB
	pollers []*Poller
	region  *Region
	done    chan cltDone
	permit  chan int
	events  chan Event
}

type cltDone struct {
	queue int
	tag   uint64
	errno int
}

// quickTiming loses no time and sends no heartbeats.
func quickTiming() Timing {
	t := DefaultTiming()
	t.Heartbeat = time.Hour
	t.ReconnectMin, t.ReconnectMax = 5*time.Millisecond, 20*time.Millisecond
	t.ConnectTimeout = 10 * time.Second
	return t
}

// cltPollers runs n pollers until the end of the test.
func cltPollers(t testing.TB, n int) []*Poller {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	pollers := make([]*Poller, n)
	for i := range pollers {
		p, err := NewPoller(i)
		if err != nil {
			t.Fatal(err)
		}
		pollers[i] = p
		wg.Go(func() { p.Run(ctx) })
	}
	t.Cleanup(func() {
		cancel()
		wg.Wait()
		for _, p := range pollers {
			if err := p.Close(); err != nil {
				t.Errorf("close poller: %v", err)
			}
		}
	})
	return pollers
}

// cltConfig returns a configuration and the client that will take its calls.
func cltConfig(t testing.TB, pollers int) (*cltClient, ClientConfig) {
	c := &cltClient{
		t: t, pollers: cltPollers(t, pollers),
		done:   make(chan cltDone, 1<<16),
		permit: make(chan int, 1<<16),
		events: make(chan Event, 1<<16),
	}
	return c, ClientConfig{
		Pollers: c.pollers,
		Timing:  quickTiming(),
		Logger:  slog.New(slog.DiscardHandler),
		OnDone: func(queue int, tag uint64, errno int) {
			c.done <- cltDone{queue, tag, errno}
		},
		OnPermit: func(queue int) { c.permit <- queue },
		OnEvent:  func(e Event) { c.events <- e },
	}
}

func cltContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// cltOpen opens a session that must come up, with 1 MiB of registered memory.
func cltOpen(t testing.TB, paths []PathAddr, edit func(*ClientConfig)) *cltClient {
	t.Helper()
	c, cfg := cltConfig(t, 2)
	if edit != nil {
		edit(&cfg)
	}
	s, err := Open(cltContext(t), "clt", paths, cfg)
	if err != nil {
		t.Fatal(err)
	}
	c.Session = s
	t.Cleanup(c.stop)
	if c.region, err = s.Register(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *cltClient) stop() {
	if err := c.Close(cltContext(c.t)); err != nil {
		c.t.Errorf("close session: %v", err)
	}
}

// on runs f on the owner of queue i.
func (c *cltClient) on(i int, f func(q *Queue) error) error {
	c.t.Helper()
	q := c.Queue(i)
	var err error
	if e := q.poller.Call(cltContext(c.t), func() { err = f(q) }); e != nil {
		c.t.Fatal(e)
	}
	return err
}

func (c *cltClient) write(queue int, tag uint64, off, n int, user string) error {
	return c.on(queue, func(q *Queue) error { return q.Write(tag, Data{c.region, off, n}, []byte(user)) })
}

func (c *cltClient) read(queue int, tag uint64, off, n int, user string) error {
	return c.on(queue, func(q *Queue) error { return q.Read(tag, Data{c.region, off, n}, []byte(user)) })
}

// next returns the next completion.
func (c *cltClient) next() cltDone {
	c.t.Helper()
	select {
	case d := <-c.done:
		return d
	case <-time.After(10 * time.Second):
		c.t.Fatal("no completion")
		return cltDone{}
	}
}

// finished waits for the completion of tag, the only one under way.
func (c *cltClient) finished(tag uint64, errno int) {
	c.t.Helper()
	if d := c.next(); d.tag != tag || d.errno != errno {
		c.t.Fatalf("completion of tag %d with errno %d, want tag %d with errno %d", d.tag, d.errno, tag, errno)
	}
}

// event waits for the next event that ok likes.
func (c *cltClient) event(what string, ok func(Event) bool) Event {
	c.t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		select {
		case e := <-c.events:
			if ok(e) {
				return e
			}
		case <-timeout:
			c.t.Fatalf("no event: %s", what)
		}
	}
}

func (c *cltClient) awaitKind(k EventKind) {
	c.t.Helper()
	c.event(k.String(), func(e Event) bool { return e.Kind == k })
}

func (c *cltClient) awaitState(path int, s PathState) Event {
	c.t.Helper()
	return c.event(s.String(), func(e Event) bool { return e.Kind == PathChanged && e.Path == path && e.State == s })
}

// eventually waits until ok returns true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

// cltTap collects the client's messages.
type cltTap struct {
	mu     sync.Mutex
	events []loopback.Event
}

func tapNet(net *loopback.Network, want func(loopback.Event) bool) *cltTap {
	tap := &cltTap{}
	net.Tap(func(e loopback.Event) {
		if want(e) {
			e.Data = append([]byte(nil), e.Data...)
			tap.mu.Lock()
			defer tap.mu.Unlock()
			tap.events = append(tap.events, e)
		}
	})
	return tap
}

func (tap *cltTap) all() []loopback.Event {
	tap.mu.Lock()
	defer tap.mu.Unlock()
	return append([]loopback.Event(nil), tap.events...)
}
