package iwarp

import (
	"context"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// rawPeer is an iWARP end made by hand: the test writes its messages.
type rawPeer struct {
	t    *testing.T
	conn *net.TCPConn
	crc  bool
}

var anyPort = netip.MustParseAddrPort("127.0.0.1:0")

func listen(t *testing.T, d *Device) verbs.Listener {
	t.Helper()
	l, err := d.Listen(anyPort)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func dialRaw(t *testing.T, addr netip.AddrPort) *rawPeer {
	t.Helper()
	conn, err := net.Dial("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(testLimit))
	return &rawPeer{t, conn.(*net.TCPConn), true}
}

// open does the initiator's part of the start-up with an extension block.
func (p *rawPeer) open() mpaFrame {
	p.t.Helper()
	cfg := DefaultConfig()
	req := cfg.mpaRequest(nil)
	p.conn.Write(req.encode(mpaKeyRequest))
	rep, err := readMPA(p.conn, mpaKeyReply)
	if err != nil {
		p.t.Fatal(err)
	}
	return rep
}

func (p *rawPeer) say(s segment) { p.conn.Write(s.bytes(p.crc)) }

// hear reads one frame.
func (p *rawPeer) hear() ([]byte, error) {
	b := make([]byte, 4, 1<<17)
	if _, err := io.ReadFull(p.conn, b); err != nil {
		return nil, err
	}
	h := fpduHeader(b)
	b = b[:2+h.length()+h.tail()]
	_, err := io.ReadFull(p.conn, b[4:])
	return b, err
}

// hearTerminate reads frames up to a Terminate and the end behind it.
func (p *rawPeer) hearTerminate() termCode {
	p.t.Helper()
	for {
		f, err := p.hear()
		if err != nil {
			p.t.Fatalf("no Terminate: %v", err)
		}
		if h := fpduHeader(f); h.op() == opTerminate {
			c, _ := parseTerminate(f[fpduUntagged:][:h.payload()])
			if _, err := p.hear(); err == nil {
				p.t.Error("more behind the Terminate")
			}
			return c
		}
	}
}

// acceptOne answers the next request of l with qp.
func acceptOne(t *testing.T, l verbs.Listener, qp verbs.QP) chan error {
	done := make(chan error, 1)
	go func() {
		r, err := l.Accept()
		if err == nil {
			err = r.Accept(qp, nil)
		}
		done <- err
	}()
	return done
}

// rawToServer is a connection from a raw peer to an end of ours.
func rawToServer(t *testing.T, cfg Config) (*rawPeer, *end) {
	t.Helper()
	s := newEnd(t, cfg)
	l := listen(t, s.dev)
	done := acceptOne(t, l, s.qp)
	p := dialRaw(t, l.Addr())
	p.open()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	return p, s
}

// clientToRaw is a connection from an end of ours to a raw peer. reply builds
// the peer's reply.
func clientToRaw(t *testing.T, cfg Config, reply func(req mpaFrame, conn net.Conn)) (*rawPeer, *end, error) {
	t.Helper()
	nl, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer nl.Close()
	conns := make(chan net.Conn, 1)
	go func() {
		conn, err := nl.Accept()
		if err != nil {
			conns <- nil
			return
		}
		conn.SetDeadline(time.Now().Add(testLimit))
		if req, err := readMPA(conn, mpaKeyRequest); err == nil {
			reply(req, conn)
		}
		conns <- conn
	}()
	c := newEnd(t, cfg)
	_, err = c.dev.Connect(context.Background(), c.qp, verbs.ConnectParams{Dst: addrPort(nl.Addr())})
	conn := <-conns
	t.Cleanup(func() { conn.Close() })
	return &rawPeer{t, conn.(*net.TCPConn), true}, c, err
}

// agree is the reply of a peer that takes everything.
func agree(req mpaFrame, conn net.Conn) {
	cfg := DefaultConfig()
	tm, _, d, err := cfg.checkRequest(&req)
	if err != nil {
		cfg.Foreign = true
		tm, _, d, _ = cfg.checkRequest(&req)
	}
	rep := cfg.mpaReply(&req, tm, d, false, nil)
	conn.Write(rep.encode(mpaKeyReply))
}

// ended polls e until OpDisconnected and returns the completions.
func (e *end) ended(others ...*end) []verbs.WC {
	e.t.Helper()
	var all []verbs.WC
	for {
		wc := e.next(others...)
		all = append(all, wc)
		if wc.Op == verbs.OpDisconnected {
			return all
		}
	}
}

func mustAddr(s string) netip.Addr         { return netip.MustParseAddr(s) }
func mustAddrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
