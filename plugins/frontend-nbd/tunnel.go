package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// A connection with TLS reaches its queue through a socket pair, and is served
// there as a plain one. So TLS adds nothing to the path of plain connections.
//
//	client ══ TLS ══► up ──► socket pair ──► conn
//	       ◄═════════ down ◄──────────────── conn
//
// Two goroutines carry the bytes; this is the one copy more, which is counted.
// Neither reads on before the other side has taken what it has, so a client that
// does not read is blocked at the queue as well, only later: by the buffers on the
// way, at most 2 MiB.

const (
	maxTunnels = 512       // connections with TLS
	upBuffer   = 16 << 10  // bytes; crypto/tls returns at most one record
	downBuffer = 128 << 10 // bytes

	// replyTime bounds the way of the last replies to a client that has said
	// that it is done, brokenTime that of what is left for any other client, and
	// the wait for the client's end of TLS.
	replyTime  = 5 * time.Second
	brokenTime = time.Second
)

var errManyTunnels = fmt.Errorf("there are %d connections with TLS already", maxTunnels)

// tlsTunnel is the way of a connection with TLS.
type tlsTunnel struct {
	f     *frontend
	tls   *tls.Conn
	local *net.UnixConn // the queue has the other end
}

// newTunnel gives the negotiated connection to a queue. The caller runs the
// tunnel, and closes the socket below TLS. After an error the export is released.
func (f *frontend) newTunnel(n handshakeResult, peer string) (*tlsTunnel, error) {
	if f.tunnels.Add(1) > maxTunnels {
		f.tunnels.Add(-1)
		n.exp.removeOpener()
		return nil, errManyTunnels
	}
	t := &tlsTunnel{f: f, tls: n.tls}
	err := t.connectTunnel(n, peer)
	if err != nil {
		f.tunnels.Add(-1)
		return nil, err
	}
	return t, nil
}

func (t *tlsTunnel) connectTunnel(n handshakeResult, peer string) error {
	ours, theirs, err := socketPair()
	if err != nil {
		n.exp.removeOpener()
		return err
	}
	if t.local, err = sockpair.Conn(os.NewFile(uintptr(theirs), "tunnel")); err == nil {
		err = t.tls.SetDeadline(time.Time{})
	}
	if err != nil {
		n.exp.removeOpener()
		unix.Close(ours)
		return err
	}
	enlargeSendBuffer(ours)
	if err := t.f.assignConn(ours, peer, n, t); err != nil {
		t.local.Close()
		return err
	}
	return nil
}

// isGone reports whether the client can send nothing more.
func (t *tlsTunnel) isGone() (gone bool) {
	sc, ok := t.tls.NetConn().(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return true
	}
	err = raw.Control(func(fd uintptr) { gone = shutDown(int(fd)) })
	return gone || err != nil
}

// run carries until both directions have ended.
func (t *tlsTunnel) run() {
	defer t.f.tunnels.Add(-1)
	defer t.local.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		t.copyBytes(t.tls, t.local, downBuffer, t.tls.CloseWrite)
		_ = t.tls.NetConn().SetReadDeadline(time.Now().Add(brokenTime))
	}()
	t.copyBytes(t.local, t.tls, upBuffer, t.local.CloseWrite)
	<-done
}

// copyBytes moves bytes until the source ends, and says so to the destination by
// end. Any other end of it closes the connection in both directions.
func (t *tlsTunnel) copyBytes(to io.Writer, from io.Reader, size int, end func() error) {
	buf := make([]byte, size)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			t.f.carried.Add(uint64(n))
			if _, werr := to.Write(buf[:n]); werr != nil {
				err = werr
			}
		}
		if errors.Is(err, io.EOF) {
			if err = end(); err == nil {
				return
			}
		}
		if err != nil {
			t.local.Close()
			t.tls.NetConn().Close()
			return
		}
	}
}

// onQueueClosed is called by the queue when it has closed its end, in order or not. A
// client that does not read its last replies would hold the tunnel for ever.
func (t *tlsTunnel) onQueueClosed(inOrder bool) {
	limit := brokenTime
	if inOrder {
		limit = replyTime
	}
	_ = t.tls.NetConn().SetDeadline(time.Now().Add(limit))
}
