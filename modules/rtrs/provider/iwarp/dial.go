package iwarp

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// answerLimit bounds the time to write a frame of the start-up.
const answerLimit = 5 * time.Second

// Connect implements verbs.Device.
func (d *Device) Connect(ctx context.Context, v verbs.QP, p verbs.ConnectParams) ([]byte, error) {
	q, ok := v.(*qp)
	if !ok || q.dev != d {
		return nil, fmt.Errorf("connect to %s: %w", p.Dst, softverbs.ErrForeign)
	}
	p, err := p.IP()
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if err := q.Begin(p.Private, maxUserData); err != nil {
		return nil, fmt.Errorf("connect to %s: %w", p.Dst, err)
	}
	private, err := d.connectQP(ctx, q, p)
	if err != nil {
		q.Move(softverbs.Connecting, softverbs.Down)
		return nil, fmt.Errorf("connect to %s: %w", p.Dst, err)
	}
	return private, nil
}

func (d *Device) connectQP(ctx context.Context, q *qp, p verbs.ConnectParams) ([]byte, error) {
	dialer := net.Dialer{KeepAliveConfig: d.cfg.keepAlive(), Control: d.cfg.limitSilence}
	dialer.SetMultipathTCP(false)
	if p.Src.IsValid() {
		dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(p.Src, 0))
	}
	conn, err := dialer.DialContext(ctx, "tcp", p.Dst.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	tcp := conn.(*net.TCPConn)
	tcp.SetDeadline(time.Now().Add(d.cfg.ReplyTimeout))
	stop := context.AfterFunc(ctx, func() { tcp.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	s, err := d.protectDial(tcp, &p)
	var tm connTerms
	var private []byte
	if err == nil {
		tm, private, err = d.initiateMPA(s, p.Private)
	}
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, fmt.Errorf("no MPA reply within %s: %w", d.cfg.ReplyTimeout, err)
	case err != nil:
		return nil, err
	}
	return private, q.handToOwner(s, tm)
}

// initiateMPA sends the request and checks the reply within the deadline of conn.
func (d *Device) initiateMPA(conn *startupConn, private []byte) (connTerms, []byte, error) {
	cfg := d.cfgFor(conn)
	req := cfg.mpaRequest(private)
	if _, err := conn.Write(req.encode(mpaKeyRequest)); err != nil {
		return connTerms{}, nil, fmt.Errorf("send MPA request: %w", err)
	}
	rep, err := readMPA(conn, mpaKeyReply)
	if errors.Is(err, errMPA) {
		sendTerminate(conn, &termError{termMPA, cfg.CRC})
	}
	if err != nil {
		return connTerms{}, nil, fmt.Errorf("receive MPA reply: %w", err)
	}
	tm, answer, err := cfg.checkReply(&req, &rep)
	var refused *termError
	if errors.As(err, &refused) {
		sendTerminate(conn, refused)
	}
	// A responder should not send before it has received a frame. That of siw
	// may: its frames follow the reply.
	return tm, answer, err
}

// sendTerminate tells the peer why the start-up has failed. Errors are ignored.
func sendTerminate(conn *startupConn, e *termError) {
	var b [fpduUntagged + maxTerminateLen + 3 + crcLen]byte
	n := putTerminate(b[fpduUntagged:], e.code, &faultySegment{})
	putUntagged(b[:], opTerminate, true, n, 0, 1, 0)
	conn.SetWriteDeadline(time.Now().Add(terminateLimit))
	conn.Write(sealFPDU(b[:], e.crc))
}

// handToOwner gives the socket of conn to the owner of the completion queue. The caller
// closes conn.
func (q *qp) handToOwner(conn *startupConn, tm connTerms) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	fd := -1
	var dupErr error
	if err := raw.Control(func(s uintptr) {
		fd, dupErr = unix.FcntlInt(s, unix.F_DUPFD_CLOEXEC, 0)
	}); err != nil {
		return err
	}
	if dupErr != nil {
		return fmt.Errorf("duplicate socket: %w", dupErr)
	}
	fitSendBuffer(fd)
	q.SetAddrs(addrPort(conn.LocalAddr()), addrPort(conn.RemoteAddr()))
	q.initHalves(fd, tm)
	if conn.tls != nil {
		if err := q.installTLS(conn.tls); err != nil {
			q.fd = -1
			unix.Close(fd)
			return err
		}
	}
	if !q.Move(softverbs.Connecting, softverbs.Up) {
		unix.Close(fd)
		return fmt.Errorf("queue pair was destroyed: %w", verbs.ErrClosed)
	}
	q.cq.Submit(q)
	return nil
}

// initHalves initializes both halves of an established connection.
func (q *qp) initHalves(fd int, tm connTerms) {
	q.fd, q.terms = fd, tm
	q.Ops, q.Longest = tm.opcodes(), math.MaxUint32
	q.tx.init(q.dev.cfg.MULPDU, &tm)
	q.rx.init(tm.crc)
	q.reads = make([]readEntry, tm.ord)
	q.serves = make([]serveEntry, tm.ird)
	q.terms.poke = tm.poke
}

func addrPort(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
