package faults

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/test/lab"
)

// honest is the address of a client that is served whatever strangers do.
const honest = "127.0.0.99"

// strangers are peers that use up the resources a server grants to
// unauthenticated peers. The addresses of the loopback network serve as
// different hosts.
type strangers struct {
	t   *testing.T
	to  netip.AddrPort
	dev verbs.Device
	pd  verbs.PD
	cq  verbs.CQ

	next uint64
	open map[uint64]verbs.QP // by context
	gone map[uint64]bool     // ended by the server
}

func newStrangers(t *testing.T, s *lab.Server) *strangers {
	t.Helper()
	cfg := iwarp.DefaultConfig()
	cfg.Logger = slog.New(slog.DiscardHandler)
	dev, err := iwarp.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	p := &strangers{t: t, to: netip.MustParseAddrPort(s.Addrs[0]), dev: dev, open: map[uint64]verbs.QP{}, gone: map[uint64]bool{}}
	if p.pd, err = dev.AllocPD(); err != nil {
		t.Fatal(err)
	}
	if p.cq, err = dev.CreateCQ(4096); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.leave()
		p.cq.Close()
		p.pd.Close()
		dev.Close()
	})
	return p
}

// path begins a path of a new session from an address, with conns of its two
// connections more than it opens, so that it never is connected.
func (p *strangers) path(from string, conns int) (first uint64, err error) {
	p.t.Helper()
	req := rtrswire.ConnReqFields{CIDNum: uint16(conns + 1), ReconCnt: 1, FirstConn: true}
	rand.Read(req.SessUUID[:])
	rand.Read(req.PathsUUID[:])
	first = p.next
	for cid := range conns {
		req.CID = uint16(cid)
		if err := p.dial(from, &req); err != nil {
			return first, err
		}
		req.FirstConn = false
	}
	return first, nil
}

func (p *strangers) dial(from string, req *rtrswire.ConnReqFields) error {
	p.t.Helper()
	qp, err := p.dev.CreateQP(p.pd, verbs.QPConfig{CQ: p.cq, Context: p.next, SendQueue: 1, RecvQueue: 1, MaxSGE: 1})
	if err != nil {
		p.t.Fatal(err)
	}
	b := make([]byte, rtrswire.ConnReqLen)
	rtrswire.ConnReq(b).Put(req)
	ctx, cancel := context.WithTimeout(p.t.Context(), enough)
	defer cancel()
	if _, err := p.dev.Connect(ctx, qp, verbs.ConnectParams{Src: netip.MustParseAddr(from), Dst: p.to, Private: b}); err != nil {
		qp.Destroy()
		return err
	}
	p.open[p.next] = qp
	p.next++
	return nil
}

// must is path where nothing may be refused.
func (p *strangers) must(from string, conns int) uint64 {
	p.t.Helper()
	id, err := p.path(from, conns)
	if err != nil {
		p.t.Fatalf("a path from %s: %v", from, err)
	}
	return id
}

// refused checks that a path is refused with ENOMEM.
func (p *strangers) refused(from string) {
	p.t.Helper()
	_, err := p.path(from, 1)
	var rej *verbs.RejectError
	if !errors.As(err, &rej) || rtrswire.ConnRsp(rej.Private).Check() != nil {
		p.t.Fatalf("one path too many from %s: %v, want a refusal", from, err)
	}
	if errno := rtrswire.ConnRsp(rej.Private).Errno(); errno != -int16(syscall.ENOMEM) {
		p.t.Errorf("refused with %d, want ENOMEM", errno)
	}
}

// ended reports whether the server has ended connection id.
func (p *strangers) ended(id uint64) bool {
	var wcs [64]verbs.WC
	for _, wc := range wcs[:p.cq.Poll(wcs[:])] {
		if wc.Op == verbs.OpDisconnected {
			p.gone[wc.QP] = true
		}
	}
	return p.gone[id]
}

// leave ends all connections.
func (p *strangers) leave() {
	for id, qp := range p.open {
		qp.Disconnect()
		qp.Destroy()
		delete(p.open, id)
	}
}

// events returns how often a server says that it did something.
func events(t *testing.T, s *lab.Server, fabric, name, reason string) uint64 {
	t.Helper()
	info, err := s.API.Info(t.Context(), &controlpb.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range info.FabricCounters {
		if c.Fabric == fabric && c.Name == name && c.Reason == reason {
			return c.Value
		}
	}
	t.Fatalf("no counter %s %s of %s in %v", name, reason, fabric, info.FabricCounters)
	return 0
}

// holding is the system resources of a process.
type holding struct {
	descriptors, threads int
	resident             int // kB
}

func holdingOf(t *testing.T, pid int) (h holding) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	h.descriptors = len(fds)
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		fmt.Sscanf(line, "Threads: %d", &h.threads)
		fmt.Sscanf(line, "VmRSS: %d", &h.resident)
	}
	return h
}

// limited is a server with limits, a client at the address honest, and strangers.
type limited struct {
	*strangers
	lab    *lab.T
	server *lab.Server
	client *lab.Client
	base   holding
	maps   int
}

func newLimited(t *testing.T, flags ...string) *limited {
	t.Helper()
	l := lab.New(t)
	search := ""
	for i := range 4 {
		search = l.Image(fmt.Sprintf("disk%d", i), 1<<20)
	}
	r := &limited{lab: l, server: l.Server(lab.ServerOptions{SearchPath: search, Plugins: []string{"fileio"}, Extra: flags})}
	r.client = l.Client(lab.ClientOptions{})
	r.use(t) // the server now has its resources for a first client
	eventually(t, enough, "what the client has used is given back", func() bool {
		list, err := r.server.API.ListSessions(t.Context(), &controlpb.ListRequest{})
		return err == nil && len(list.Sessions) == 0
	})
	r.base = holdingOf(t, r.server.PID())
	r.strangers = newStrangers(t, r.server)
	return r
}

func (r *limited) mapFrom(device, session string) (*controlpb.ClientDevice, error) {
	return r.client.Map(device, r.server, func(m *controlpb.MapRequest) {
		m.Paths, m.Session = []string{honest + "@" + r.server.Addrs[0]}, session
	})
}

// use maps a device from the honest address in a new session, reads and unmaps it.
func (r *limited) use(t *testing.T) {
	t.Helper()
	r.maps++
	d, err := r.mapFrom("disk0", fmt.Sprint("use", r.maps))
	if err != nil {
		t.Fatalf("an honest client at %s: %v", honest, err)
	}
	n, err := dialDevice(r.client, d.Name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.ReadAt(make([]byte, 4096), 0); err != nil {
		t.Errorf("read by an honest client: %v", err)
	}
	n.Close()
	eventually(t, enough, "the device is not in use any more", func() bool {
		err := r.client.Unmap(d.Name, false)
		return err == nil
	})
}

// back checks that the resources taken by strangers are given back after they
// have left.
func (r *limited) back(t *testing.T) {
	t.Helper()
	r.leave()
	var now holding
	end := time.Now().Add(enough)
	for {
		r.ended(0) // it drives the connections
		now = holdingOf(t, r.server.PID())
		if now.descriptors <= r.base.descriptors && now.threads <= r.base.threads+8 && now.resident <= r.base.resident+(32<<10) {
			return
		}
		if time.Now().After(end) {
			t.Errorf("the server holds %+v after the strangers have left, and held %+v before", now, r.base)
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Each limit of SECURITY.md on the real daemon: requests beyond it are refused
// and counted, another address is still served when one is at its limit, and
// the resources are given back.
func TestHostileClientsMeetTheLimits(t *testing.T) {
	const memory = 512 * 128 << 10 // of a session
	all := []string{"127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5"}
	one := []string{"127.0.0.2", "127.0.0.2", "127.0.0.2", "127.0.0.2"}
	for _, tt := range []struct {
		limit  string
		conns  int      // of each path
		from   []string // of the paths that fit, and of the one that does not
		reason string
	}{
		{"sessions-per-address=3", 1, one, "sessions"},
		{"sessions=3", 1, all, "sessions"},
		{"connections-per-address=6", 2, one, "connections"},
		{"connections=6", 2, all, "connections"},
		{fmt.Sprint("chunk-memory-per-address=", 3*memory), 1, one, "chunk-memory"},
		{fmt.Sprint("chunk-memory=", 3*memory), 1, all, "chunk-memory"},
	} {
		t.Run(strings.Split(tt.limit, "=")[0], func(t *testing.T) {
			r := newLimited(t, "--limit", tt.limit)
			first := r.must(tt.from[0], tt.conns)
			r.must(tt.from[1], tt.conns)
			r.must(tt.from[2], tt.conns)
			r.refused(tt.from[3])
			if n := events(t, r.server, "server", "refused", tt.reason); n != 1 {
				t.Errorf("%d refusals are counted", n)
			}
			eventually(t, enough, "the oldest path that is not connected gives way", func() bool { return r.ended(first) })
			if strings.Contains(tt.limit, "per-address") {
				r.must("127.0.0.9", 1) // another stranger
			} else {
				eventually(t, enough, "the refused one finds room", func() bool { _, err := r.path(tt.from[3], 1); return err == nil })
				eventually(t, enough, "an honest client finds room", func() bool {
					r.ended(0)
					d, err := r.mapFrom("disk1", "patient")
					return err == nil && r.client.Unmap(d.Name, false) == nil
				})
				r.leave()
				eventually(t, enough, "the strangers have left", func() bool { r.ended(0); return holdingOf(t, r.server.PID()).descriptors <= r.base.descriptors })
			}
			r.use(t)
			r.back(t)
		})
	}
}

// Of the paths that are not connected the oldest gives way, and nobody is refused.
func TestHostileClientsThatDoNotFinishGiveWay(t *testing.T) {
	for _, tt := range []struct {
		limit string
		from  []string
	}{
		{"unfinished-per-address=3", []string{"127.0.0.2", "127.0.0.2", "127.0.0.2", "127.0.0.2"}},
		{"unfinished=3", []string{"127.0.0.2", "127.0.0.2", "127.0.0.3", "127.0.0.4"}},
	} {
		t.Run(tt.limit, func(t *testing.T) {
			r := newLimited(t, "--limit", tt.limit)
			var ids []uint64
			for _, from := range tt.from {
				ids = append(ids, r.must(from, 1))
			}
			eventually(t, enough, "the oldest of the address with the most gives way", func() bool { return r.ended(ids[0]) })
			if r.ended(ids[1]) || r.ended(ids[2]) || r.ended(ids[3]) {
				t.Error("another one gave way too")
			}
			if n := events(t, r.server, "server", "unfinished", "gave-way"); n != 1 {
				t.Errorf("%d are counted", n)
			}
			r.use(t)
			r.back(t)
		})
	}
}

// A path has --info-timeout until it is connected.
func TestHostileClientsWithoutInfoAreDropped(t *testing.T) {
	r := newLimited(t, "--info-timeout", "300ms")
	id := r.must("127.0.0.2", 2)
	eventually(t, enough, "the path is dropped", func() bool { return r.ended(id) })
	if n := events(t, r.server, "server", "unfinished", "timed-out"); n != 1 {
		t.Errorf("%d are counted", n)
	}
	r.use(t)
	r.back(t)
}

// A session has as many devices as it may; another one has as many again.
func TestHostileClientsWithManyDevices(t *testing.T) {
	r := newLimited(t, "--limit", "devices-per-session=2")
	for i, session := range []string{"one", "one", "two", "two"} {
		if _, err := r.mapFrom(fmt.Sprint("disk", i), session); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.mapFrom("disk3", "one"); err == nil || !strings.Contains(err.Error(), syscall.EMFILE.Error()) {
		t.Errorf("a third device of a session: %v, want EMFILE", err)
	}
	if n := events(t, r.server, "server", "refused", "devices"); n != 1 {
		t.Errorf("%d refusals are counted", n)
	}
}

// As many OPENs are under way as may be; one that takes long is answered nevertheless.
func TestHostileClientsWithManyOpens(t *testing.T) {
	r := newLimited(t, "--limit", "opens=1")
	p, err := r.server.Plugin("fileio")
	if err != nil {
		t.Fatal(err)
	}
	if err := lab.Freeze(int(p.Pid)); err != nil {
		t.Fatal(err)
	}
	maps := make(chan error, 2)
	for _, session := range []string{"one", "two"} {
		go func() {
			_, err := r.mapFrom("disk0", session)
			maps <- err
		}()
	}
	if err := <-maps; err == nil || !strings.Contains(err.Error(), syscall.EBUSY.Error()) {
		t.Errorf("an OPEN beside one that takes long: %v, want EBUSY", err)
	}
	if events(t, r.server, "server", "refused", "opens") == 0 {
		t.Error("no refusal is counted")
	}
	if err := syscall.Kill(int(p.Pid), syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := <-maps; err != nil {
		t.Errorf("the OPEN that took long: %v", err)
	}
	if _, err := r.mapFrom("disk1", "three"); err != nil {
		t.Errorf("after it: %v", err)
	}
}

// Connections that say nothing are as many as the fabric lets in, the oldest is
// closed first, and the honest client is among others of its kind at once.
func TestHostileConnectionsThatSayNothing(t *testing.T) {
	most := iwarp.DefaultConfig()
	r := newLimited(t)
	silent := func(from string, n int) (conns []net.Conn) {
		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
		for range n {
			conn, err := d.Dial("tcp", r.server.Addrs[0])
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { conn.Close() })
			conns = append(conns, conn)
		}
		return conns
	}
	conns := silent("127.0.0.2", most.MaxHandshakesPerAddress+20)
	for i, conn := range conns[:20] {
		conn.SetReadDeadline(time.Now().Add(enough))
		if _, err := conn.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d of an address with too many: %v, want its end", i, err)
		}
	}
	r.use(t)
	for i := 3; i < 9; i++ {
		conns = append(conns, silent(fmt.Sprint("127.0.0.", i), most.MaxHandshakesPerAddress-10)...)
	}
	r.use(t)
	if n := events(t, r.server, "iwarp", "refused_handshakes", "gave way"); n < 20+uint64(len(conns))/8 {
		t.Errorf("%d handshakes gave way, of %d connections", n, len(conns))
	}
	for _, conn := range conns {
		conn.Close()
	}
	r.back(t)
}

// Refusals write a bounded number of lines.
func TestHostileClientsThatAreRefusedDoNotFillTheLog(t *testing.T) {
	r := newLimited(t, "--limit", "sessions-per-address=1", "--limit", "unfinished-per-address=0")
	lines := func() int { return strings.Count(r.server.Log(), "connection refused") }
	r.must("127.0.0.2", 1)
	begun := time.Now()
	const n = 300
	for range n {
		req := rtrswire.ConnReqFields{CIDNum: 2, ReconCnt: 1} // of a session that is unknown
		rand.Read(req.PathsUUID[:])
		if err := r.dial("127.0.0.2", &req); err == nil {
			t.Fatal("a connection of no session was accepted")
		}
	}
	eventually(t, enough, "the log says how many lines were left out", func() bool { return strings.Contains(r.server.Log(), "left_out") })
	if got, most := lines(), 20+10*int(time.Since(begun).Seconds()+1); got > most || got == 0 {
		t.Errorf("%d lines of %d refusals in %v, want at most %d", got, n, time.Since(begun), most)
	}
}
