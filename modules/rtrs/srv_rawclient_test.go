package rtrs

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// A small client that speaks verbs and rtrswire directly, so that it can send
// wrong things. The test's goroutine owns all its queues.

var (
	serverAddr = netip.MustParseAddrPort("10.0.0.1:1234")
	clientAddr = netip.MustParseAddr("10.1.0.1")
	otherAddr  = netip.MustParseAddr("10.1.0.2")
)

// heapMemory is chunk memory for tests.
type heapMemory struct {
	mem   []byte
	freed func()
}

func (m *heapMemory) Bytes() []byte { return m.mem }
func (m *heapMemory) Close() error  { m.freed(); return nil }

// testHandler serves requests by a function and counts its calls.
type testHandler struct {
	request func(op *Op)

	mu          sync.Mutex
	upErr       error
	ups, downs  int
	alive       int // session memories
	goingDown   int // calls of SessionDown, those that are blocked among them
	downBlocked chan struct{}
}

func (h *testHandler) SessionUp(*SrvSession) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.upErr == nil {
		h.ups++
	}
	return h.upErr
}

func (h *testHandler) SessionDown(*SrvSession) {
	h.mu.Lock()
	h.goingDown++
	h.mu.Unlock()
	if h.downBlocked != nil {
		<-h.downBlocked
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.downs++
}

// waitGoingDown waits until a session is being taken down. downBlocked keeps
// that from ending.
func (h *testHandler) waitGoingDown(t *testing.T) {
	t.Helper()
	eventually(t, "the session to go down", func() bool {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.goingDown > 0
	})
}

func (h *testHandler) Request(op *Op) { h.request(op) }

func (h *testHandler) counts() (ups, downs, alive int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.ups, h.downs, h.alive
}

// serve answers at once; a READ returns the bytes 'r'.
func serve(op *Op) {
	if op.IsRead() {
		for i := range op.Data() {
			op.Data()[i] = 'r'
		}
	}
	op.Respond(0)
}

// testServer is a server on a loopback network.
type testServer struct {
	*Server
	t       testing.TB
	net     *loopback.Network
	dev     verbs.Device
	handler *testHandler
}

type serverOption func(*ServerConfig)

func plainKeys(c *ServerConfig) { c.AlwaysInvalidate = false }

func depth(n int) serverOption { return func(c *ServerConfig) { c.QueueDepth = n } }

func heartbeatEvery(d time.Duration, misses int) serverOption {
	return func(c *ServerConfig) { c.Timing.Heartbeat, c.Timing.HeartbeatMisses = d, misses }
}

// startServer runs a server with two pollers, 8 chunks of 8 KiB, and checks at
// the end of the test that everything was given back. It sends no heartbeats
// unless opts ask for them: the raw client does not answer them, and a path
// that ends for that reason would look like one that was closed for its
// messages.
func startServer(t testing.TB, net *loopback.Network, request func(*Op), opts ...serverOption) *testServer {
	t.Helper()
	h := &testHandler{request: request}
	cfg := DefaultServerConfig()
	cfg.QueueDepth, cfg.ChunkSize = 8, 8192
	cfg.Timing.Heartbeat = time.Hour
	cfg.Logger = slog.New(slog.DiscardHandler)
	cfg.Pollers = startPollers(t, 2)
	cfg.Handler = h
	cfg.Alloc = func(size int) (Memory, error) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.alive++
		return &heapMemory{make([]byte, size), func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.alive--
		}}, nil
	}
	for _, o := range opts {
		o(&cfg)
	}
	srv, err := NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	s := &testServer{srv, t, net, net.Device("server"), h}
	if _, err := srv.Listen(s.dev, netip.AddrPortFrom(netip.IPv6Unspecified(), serverAddr.Port())); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.stop)
	return s
}

func (s *testServer) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := s.Close(ctx); err != nil {
		s.t.Errorf("close server: %v", err)
	}
	if ups, downs, alive := s.handler.counts(); ups != downs || alive != 0 {
		s.t.Errorf("after close: %d sessions up, %d down, %d memories left", ups, downs, alive)
	}
}

// startPollers runs n pollers until the end of the test.
func startPollers(t testing.TB, n int) []*Poller {
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

// rawPath is one path of the raw client.
type rawPath struct {
	t        testing.TB
	dev      verbs.Device
	pd       verbs.PD
	cq       verbs.CQ
	qps      []verbs.QP
	src      netip.Addr
	req      rtrswire.ConnReqFields
	rep      rtrswire.ConnRspFields
	shift    uint
	chunk    int // size
	bufs     []rawBuf
	mem      []byte // send buffer of chunk i at i*chunk; then receive buffers
	mr       verbs.MR
	reply    []byte // where READs go, at chunk*size
	replies  []verbs.MR
	replyKey []uint32
	recvMem  []byte // INFO_REQ at 4096, INFO_RSP at 8192
	recvMR   verbs.MR
	slots    []byte
	slotMR   verbs.MR
	got      []rawMsg // receives not yet taken
	downs    int
	sendErrs []verbs.WC
}

type rawBuf struct {
	addr uint64
	rkey uint32
}

// rawMsg is a receive with a copy of its payload.
type rawMsg struct {
	verbs.WC
	data []byte
}

const (
	rawRecv  = 64      // bytes of a receive of the raw client; INFO_RSP has its own
	rawSlots = 64      // receives of a connection
	rawInfo  = 1 << 20 // id of the receive of INFO_RSP
)

func newUUID() (u rtrswire.UUID) {
	_, _ = rand.Read(u[:])
	return u
}

// newRawPath prepares a path with conns connections of a new session.
func newRawPath(t testing.TB, net *loopback.Network, conns int) *rawPath {
	t.Helper()
	c := &rawPath{t: t, dev: net.Device("client"), src: clientAddr}
	c.req = rtrswire.ConnReqFields{CIDNum: uint16(conns), ReconCnt: 1, SessUUID: newUUID(), PathsUUID: newUUID(), FirstConn: true}
	var err error
	if c.pd, err = c.dev.AllocPD(); err != nil {
		t.Fatal(err)
	}
	if c.cq, err = c.dev.CreateCQ(1024); err != nil {
		t.Fatal(err)
	}
	c.recvMem = make([]byte, 32768)
	if c.recvMR, err = c.pd.RegMR(c.recvMem, 0); err != nil {
		t.Fatal(err)
	}
	c.qps = make([]verbs.QP, conns)
	t.Cleanup(func() { // after those of the queue pairs
		c.hangUp()
		if err := c.cq.Close(); err != nil {
			t.Errorf("close the raw client: %v", err)
		}
	})
	return c
}

// second prepares another path of the same session.
func (c *rawPath) second(net *loopback.Network, src netip.Addr) *rawPath {
	p := newRawPath(c.t, net, len(c.qps))
	p.req.PathsUUID, p.req.FirstConn, p.src = c.req.PathsUUID, false, src
	return p
}

// hangUp ends all connections.
func (c *rawPath) hangUp() {
	for i, qp := range c.qps {
		if qp != nil {
			qp.Disconnect()
			qp.Destroy()
			c.qps[i] = nil
		}
	}
}

// private is the private data of connection cid.
func (c *rawPath) private(cid int) []byte {
	b, f := make([]byte, rtrswire.ConnReqLen), c.req
	f.CID = uint16(cid)
	rtrswire.ConnReq(b).Put(&f)
	return b
}

// dial opens a connection with the given private data.
func (c *rawPath) dial(cid int, private []byte) ([]byte, error) {
	qp, err := c.dev.CreateQP(c.pd, verbs.QPConfig{CQ: c.cq, Context: uint64(cid), SendQueue: 4096, RecvQueue: 4096, MaxSGE: 2})
	if err != nil {
		c.t.Fatal(err)
	}
	if cid == 0 {
		if _, err := qp.PostRecv([]verbs.RecvWR{{ID: rawInfo, Buf: c.recvMem[8192:], LKey: c.recvMR.LKey()}}); err != nil {
			c.t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	rep, err := c.dev.Connect(ctx, qp, verbs.ConnectParams{Src: c.src, Dst: serverAddr, Private: private})
	if err != nil {
		qp.Destroy()
		return nil, err
	}
	if cid < len(c.qps) && c.qps[cid] == nil {
		c.qps[cid] = qp
	} else {
		c.t.Cleanup(qp.Destroy)
	}
	return rep, nil
}

// connect opens connections cids, all if there are none given.
func (c *rawPath) connect(cids ...int) *rawPath {
	c.t.Helper()
	if cids == nil {
		for cid := range c.qps {
			cids = append(cids, cid)
		}
	}
	for _, cid := range cids {
		rep, err := c.dial(cid, c.private(cid))
		if err != nil {
			c.t.Fatalf("connect cid %d: %v", cid, err)
		}
		c.takeRep(rep)
	}
	return c
}

func (c *rawPath) takeRep(rep []byte) {
	if err := rtrswire.ConnRsp(rep).Check(); err != nil {
		c.t.Fatal(err)
	}
	c.rep = rtrswire.ConnRsp(rep).Fields()
	c.shift = rtrswire.BufShift(int(c.rep.QueueDepth))
	c.chunk = int(c.rep.MaxIOSize + c.rep.MaxHdrSize)
}

// refused dials and returns the errno of the refusal.
func (c *rawPath) refused(cid int, private []byte) int {
	c.t.Helper()
	_, err := c.dial(cid, private)
	var rej *verbs.RejectError
	if !errors.As(err, &rej) {
		c.t.Fatalf("dial: %v, want a refusal", err)
	}
	if err := rtrswire.ConnRsp(rej.Private).Check(); err != nil || len(rej.Private) != rtrswire.ConnRspLen {
		c.t.Fatalf("refusal with %d bytes: %v", len(rej.Private), err)
	}
	return int(rtrswire.ConnRsp(rej.Private).Errno())
}

// sendInfo sends b as INFO_REQ.
func (c *rawPath) sendInfo(b []byte) {
	n := copy(c.recvMem[4096:], b)
	c.post(0, verbs.SendWR{Op: verbs.OpSend, SGEs: []verbs.SGE{{Buf: c.recvMem[4096:][:n], LKey: c.recvMR.LKey()}}})
}

func infoReq(name string) []byte {
	b := make([]byte, rtrswire.InfoReqLen)
	rtrswire.InfoReq(b).Put(name)
	return b
}

// info does the INFO exchange and posts receives.
func (c *rawPath) info(name string) *rawPath {
	c.t.Helper()
	c.sendInfo(infoReq(name))
	return c.takeInfo()
}

// takeInfo takes the INFO_RSP and posts receives.
func (c *rawPath) takeInfo() *rawPath {
	c.t.Helper()
	wc := c.recv()
	m := rtrswire.InfoRsp(wc.data)
	if err := m.Check(int(c.rep.QueueDepth), c.chunk); err != nil {
		c.t.Fatal(err)
	}
	c.bufs = nil
	for i := range m.Count() {
		d := m.Desc(i)
		for off := 0; off < int(d.Len); off += c.chunk {
			c.bufs = append(c.bufs, rawBuf{d.Addr + uint64(off), d.Key})
		}
	}
	c.register()
	for slot := range rawSlots * len(c.qps) {
		c.postRecv(slot)
	}
	return c
}

// register makes a send buffer and a reply area as large as the chunks.
func (c *rawPath) register() {
	c.mem, c.reply = make([]byte, len(c.bufs)*c.chunk), make([]byte, len(c.bufs)*c.chunk)
	c.slots = make([]byte, rawRecv*rawSlots*len(c.qps))
	var err error
	if c.mr, err = c.pd.RegMR(c.mem, 0); err != nil {
		c.t.Fatal(err)
	}
	if c.slotMR, err = c.pd.RegMR(c.slots, 0); err != nil {
		c.t.Fatal(err)
	}
	for i := range c.bufs {
		mr, err := c.pd.RegMR(c.reply[i*c.chunk:][:c.chunk], verbs.AccessRemoteWrite)
		if err != nil {
			c.t.Fatal(err)
		}
		c.replies, c.replyKey = append(c.replies, mr), append(c.replyKey, mr.RKey())
	}
}

// postRecv posts receive slot; rawSlots of them belong to a connection.
func (c *rawPath) postRecv(slot int) {
	buf := c.slots[slot*rawRecv:][:rawRecv]
	if _, err := c.qps[slot/rawSlots].PostRecv([]verbs.RecvWR{{ID: uint64(slot), Buf: buf, LKey: c.slotMR.LKey()}}); err != nil && !errors.Is(err, verbs.ErrNotConnected) {
		c.t.Errorf("post receive: %v", err)
	}
}

func (c *rawPath) post(cid int, wr verbs.SendWR) {
	c.t.Helper()
	wr.Signaled = true
	if _, err := c.qps[cid].PostSend([]verbs.SendWR{wr}); err != nil && !errors.Is(err, verbs.ErrNotConnected) {
		c.t.Fatalf("post: %v", err)
	}
	c.cq.Flush()
}

func (c *rawPath) imm(cid int, imm rtrswire.Imm) {
	c.post(cid, verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(imm)})
}

// put writes b at off of the chunk and announces it with imm.
func (c *rawPath) put(cid, chunk, off int, b []byte, imm rtrswire.Imm) {
	c.t.Helper()
	buf := c.mem[chunk*c.chunk:][:len(b)]
	copy(buf, b)
	c.post(cid, verbs.SendWR{
		Op: verbs.OpWriteImm, Imm: uint32(imm), RemoteAddr: c.bufs[chunk].addr + uint64(off), RKey: c.bufs[chunk].rkey,
		SGEs: []verbs.SGE{{Buf: buf, LKey: c.mr.LKey()}},
	})
}

// write sends a WRITE.
func (c *rawPath) write(cid, chunk int, data, usr []byte) {
	c.t.Helper()
	b := append(bytes.Clone(data), usr...)
	b = append(b, 0, 0, 0, 0)
	rtrswire.PutWriteHdr(b[len(b)-4:], len(usr))
	c.put(cid, chunk, 0, b, rtrswire.IOReqImm(c.shift, chunk, len(data)+len(usr)))
}

// fence sends a FENCE.
func (c *rawPath) fence(cid, chunk int, path rtrswire.UUID) {
	c.t.Helper()
	b := append(path[:], 0, 0, 0, 0)
	rtrswire.PutFenceHdr(b[16:], 16)
	c.put(cid, chunk, 0, b, rtrswire.IOReqImm(c.shift, chunk, 16))
}

// read sends a READ of n bytes; n 0: without descriptor.
func (c *rawPath) read(cid, chunk, n int, usr []byte, inval bool) {
	c.t.Helper()
	b := append(bytes.Clone(usr), make([]byte, rtrswire.MaxReqHdrLen)...)
	if n == 0 {
		b = b[:len(usr)+rtrswire.PutReadHdr(b[len(usr):], len(usr))]
	} else {
		rtrswire.PutReadDescHdr(b[len(usr):], len(usr), inval, c.desc(chunk, n))
	}
	c.put(cid, chunk, n, b, rtrswire.IOReqImm(c.shift, chunk, n+len(usr)))
}

// desc names the reply area of a chunk.
func (c *rawPath) desc(chunk, n int) rtrswire.Desc {
	return rtrswire.Desc{Addr: c.replies[chunk].Addr(), Key: c.replyKey[chunk], Len: uint32(n)}
}

// pump polls once.
func (c *rawPath) pump() {
	var wcs [64]verbs.WC
	for _, wc := range wcs[:c.cq.Poll(wcs[:])] {
		switch {
		case wc.Op == verbs.OpDisconnected:
			c.downs++
		case wc.Status == verbs.StatusFlushed:
		case wc.Op == verbs.OpRecv || wc.Op == verbs.OpRecvImm:
			c.takeMsg(wc)
		case wc.Status != verbs.StatusOK:
			c.sendErrs = append(c.sendErrs, wc)
		}
	}
}

func (c *rawPath) takeMsg(wc verbs.WC) {
	if wc.ID == rawInfo {
		c.got = append(c.got, rawMsg{wc, bytes.Clone(c.recvMem[8192:][:wc.ByteLen])})
		return
	}
	c.got = append(c.got, rawMsg{wc, bytes.Clone(c.slots[int(wc.ID)*rawRecv:][:wc.ByteLen])})
	c.postRecv(int(wc.ID))
}

// recv waits for the next receive; heartbeats are answered and left out.
func (c *rawPath) recv() rawMsg {
	c.t.Helper()
	eventually(c.t, "a receive", func() bool { c.pump(); return len(c.got) > 0 })
	wc := c.got[0]
	c.got = c.got[1:]
	if wc.HasImm && rtrswire.Imm(wc.Imm) == rtrswire.HeartbeatImm {
		c.imm(0, rtrswire.HeartbeatAckImm)
		return c.recv()
	}
	return wc
}

// answerBeats polls once and answers the heartbeats that have come.
func (c *rawPath) answerBeats() {
	c.pump()
	c.got = slices.DeleteFunc(c.got, func(m rawMsg) bool {
		if !m.HasImm || rtrswire.Imm(m.Imm) != rtrswire.HeartbeatImm {
			return false
		}
		c.imm(0, rtrswire.HeartbeatAckImm)
		return true
	})
}

// silent checks that the server sends nothing for a while.
func (c *rawPath) silent(when string) {
	c.t.Helper()
	for range 20 {
		c.pump()
		time.Sleep(time.Millisecond)
	}
	if len(c.got) > 0 || c.downs > 0 {
		c.t.Fatalf("%s: %d messages, %d connections down", when, len(c.got), c.downs)
	}
}

// answer is the client's view of an answer.
type answer struct {
	cid, chunk, errno int
	inv               bool // type 2, and a SEND WITH INVALIDATE came before
}

// answer waits for the next answer and takes the new key of its chunk.
func (c *rawPath) answer() answer {
	c.t.Helper()
	wc := c.recv()
	inv := wc.HasInv
	if inv {
		c.renewReply(wc.InvKey)
		wc = c.recv()
	}
	imm := rtrswire.Imm(wc.Imm)
	errno, chunk := imm.IORsp()
	a := answer{int(wc.QP), chunk, errno, imm.Type() == rtrswire.ImmIORspInv}
	if a.inv != inv || imm.Type() != rtrswire.ImmIORsp && imm.Type() != rtrswire.ImmIORspInv {
		c.t.Fatalf("immediate %#08x after invalidate %v", imm, inv)
	}
	if c.rep.Flags&rtrswire.FlagNewRkey == 0 {
		return a
	}
	m := rtrswire.RkeyRsp(wc.data)
	if wc.Op != verbs.OpRecv || len(m) != rtrswire.RkeyRspLen || !m.Valid(chunk) {
		c.t.Fatalf("answer %#08x with %x", imm, wc.data)
	}
	c.bufs[chunk].rkey = m.Rkey()
	return a
}

// renewReply makes the reply area usable again that was invalidated by key.
func (c *rawPath) renewReply(key uint32) {
	c.t.Helper()
	for i, k := range c.replyKey {
		if k == key {
			if c.dev.Info().Caps&verbs.CapKeyRotation == 0 {
				return
			}
			c.replyKey[i] = verbs.NextKey(k)
			c.post(0, verbs.SendWR{Op: verbs.OpRegMR, RKey: c.replyKey[i]})
			return
		}
	}
	c.t.Fatalf("the server invalidated %#x, which is no key of a reply", key)
}

func (c *rawPath) expect(want answer) {
	c.t.Helper()
	if got := c.answer(); got != want {
		c.t.Fatalf("answer %+v, want %+v", got, want)
	}
}

// waitDown waits until the server has closed all connections of the path.
func (c *rawPath) waitDown() {
	c.t.Helper()
	eventually(c.t, "the path to be closed", func() bool { c.pump(); return c.downs == len(c.qps) })
}

// stillWorks proves that the path serves requests.
func (c *rawPath) stillWorks() {
	c.t.Helper()
	c.write(0, 0, []byte("data"), []byte("usr"))
	c.expect(answer{0, 0, 0, false})
	if c.downs > 0 {
		c.t.Fatal("a connection is down")
	}
}

// stillWorksWith is stillWorks where the consumer keeps its requests.
func (c *rawPath) stillWorksWith(p *parking) {
	c.t.Helper()
	c.write(0, 0, []byte("data"), []byte("usr"))
	p.respond(p.take(c), 0)
	c.expect(answer{0, 0, 0, false})
}

// newSession connects a path with conns connections.
func newSession(t testing.TB, net *loopback.Network, conns int, name string) *rawPath {
	t.Helper()
	return newRawPath(t, net, conns).connect().info(name)
}

// both runs f with both key modes.
func both(t *testing.T, f func(t *testing.T, mode serverOption, newRkey bool)) {
	t.Run("plain keys", func(t *testing.T) { f(t, plainKeys, false) })
	t.Run("always invalidate", func(t *testing.T) { f(t, func(*ServerConfig) {}, true) })
}

// wireLog collects the server's messages.
type wireLog struct {
	mu     sync.Mutex
	events []loopback.Event
}

// tapServer collects the work requests that leave the server, with copies of
// their payload.
func tapServer(net *loopback.Network) *wireLog {
	l := &wireLog{}
	net.Tap(func(e loopback.Event) {
		if e.Kind == loopback.KindWork && e.From.Addr() == serverAddr.Addr() {
			e.Data = bytes.Clone(e.Data)
			l.mu.Lock()
			l.events = append(l.events, e)
			l.mu.Unlock()
		}
	})
	return l
}

// take returns the messages since the last call.
func (l *wireLog) take() []loopback.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.events
	l.events = nil
	return e
}

func le32(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }
