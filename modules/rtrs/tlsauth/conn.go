package tlsauth

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tlsrecord"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Conn is a connection after its handshake. Until Detach it is used as a
// tls.Conn.
type Conn struct {
	*tls.Conn
	tap      *socketTap
	client   bool
	suite    uint16
	peer     string
	claim    string // identity of a shared key that the peer names, or the key; empty: none
	expires  time.Time
	proof    *heldProof
	security verbs.Security
}

func newConn(conn net.Conn, client bool) *Conn {
	turns, _ := conn.(Turns)
	return &Conn{proof: &heldProof{}, tap: &socketTap{Conn: conn, turns: turns}, client: client}
}

// Turns is implemented by a connection whose handshake is one of many. The
// handshake computes only between Take and Give: Take returns when its turn has
// come, or the reason why the handshake must end.
type Turns interface {
	Take() error
	Give()
}

// Security returns how the connection is protected.
func (c *Conn) Security() verbs.Security { return c.security }

// Detach ends the work of crypto/tls. It returns the two directions for the data
// path, and data that were received and not yet read. Nothing more is read from
// the socket or written to it.
func (c *Conn) Detach() (in *tlsrecord.Opener, out *tlsrecord.Sealer, rest []byte, err error) {
	if rest, err = c.unreadData(); err != nil {
		return nil, nil, nil, err
	}
	read, written := c.tap.secrets.server, c.tap.secrets.client
	if !c.client {
		read, written = written, read
	}
	if in, err = replayRecords(tlsrecord.Keys{Suite: c.suite, Secret: read}, c.tap.in.kept, c.client); err != nil {
		return nil, nil, nil, fmt.Errorf("take over what is received: %w", err)
	}
	// The peer would open the bytes that this end has sent.
	sent, err := replayRecords(tlsrecord.Keys{Suite: c.suite, Secret: written}, c.tap.out.kept, !c.client)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("take over what is sent: %w", err)
	}
	out, err = tlsrecord.NewSealer(sent.Keys())
	return in, out, rest, err
}

// unreadData returns data that crypto/tls has received and not returned.
func (c *Conn) unreadData() (rest []byte, err error) {
	c.tap.stopped = true
	buf := make([]byte, tlsrecord.MaxContent)
	for err == nil {
		var n int
		n, err = c.Read(buf)
		rest = append(rest, buf[:n]...)
	}
	if !errors.Is(err, errStopped) {
		return nil, err
	}
	if len(c.tap.in.part) > 0 || len(c.tap.out.part) > 0 {
		return nil, errors.New("TLS: a record is not complete")
	}
	return rest, nil
}

// replayRecords returns the opener of a direction as it is behind records. Records of
// the handshake are left out, since they have other keys.
func replayRecords(k tlsrecord.Keys, records []byte, client bool) (*tlsrecord.Opener, error) {
	o, err := tlsrecord.NewOpener(k, client)
	if err != nil {
		return nil, err
	}
	record := make([]byte, tlsrecord.MaxRecord)
	for begun := false; len(records) > 0; {
		if records[0] != tlsrecord.ApplicationData { // hello, change of cipher
			records = records[tlsrecord.HeaderLen+int(binary.BigEndian.Uint16(records[3:])):]
			continue
		}
		size, err := o.Next(records)
		if err != nil || size == 0 {
			return nil, fmt.Errorf("a record is not complete: %w", err)
		}
		typ, content, err := o.Open(record[:copy(record, records[:size])])
		records = records[size:]
		switch {
		case err != nil && begun:
			return nil, err
		case err != nil:
			continue // of the handshake
		}
		if begun = true; typ != tlsrecord.ApplicationData {
			if event, err := o.Control(typ, content); err != nil || event == tlsrecord.Closed {
				return nil, fmt.Errorf("the connection has ended: %w", err)
			}
		}
	}
	return o, nil
}

// errStopped is the error that crypto/tls reads after Detach.
var errStopped = errors.New("the socket was handed over")

// socketTap is the socket as crypto/tls sees it. It never gives more than the rest of
// one record, so that crypto/tls reads nothing in advance, and keeps the records
// from the moment on when the traffic secrets are known.
type socketTap struct {
	net.Conn
	secrets trafficSecrets
	in, out recordFlow
	stopped bool
	turns   Turns // nil: none are needed, or not any more
	turn    bool  // it is the turn of this handshake
}

// takeTurn waits for a turn, unless it has come.
func (t *socketTap) takeTurn() error {
	if t.turns == nil || t.turn {
		return nil
	}
	err := t.turns.Take()
	t.turn = err == nil
	return err
}

// giveTurn ends the turn, if there is one.
func (t *socketTap) giveTurn() {
	if t.turn {
		t.turn = false
		t.turns.Give()
	}
}

// recordFlow are the records of one direction.
type recordFlow struct {
	part []byte // of a record that is not complete
	kept []byte
}

// maxKept bounds the records that are kept, in bytes.
const maxKept = 1 << 20

var errTooMuch = errors.New("the peer sends too much during the start of TLS")

// missingBytes returns how many bytes the record in progress needs, or its header.
func (f *recordFlow) missingBytes() int {
	if len(f.part) < tlsrecord.HeaderLen {
		return tlsrecord.HeaderLen - len(f.part)
	}
	return tlsrecord.HeaderLen + int(binary.BigEndian.Uint16(f.part[3:])) - len(f.part)
}

// passBytes notes bytes that pass.
func (f *recordFlow) passBytes(b []byte, keep bool) error {
	for len(b) > 0 {
		n := min(len(b), f.missingBytes())
		f.part = append(f.part, b[:n]...)
		b = b[n:]
		if len(f.part) < tlsrecord.HeaderLen || f.missingBytes() > 0 {
			continue
		}
		if keep {
			f.kept = append(f.kept, f.part...)
		}
		if len(f.kept) > maxKept {
			return errTooMuch
		}
		f.part = f.part[:0]
	}
	return nil
}

func (t *socketTap) Read(b []byte) (int, error) {
	if t.stopped {
		return 0, errStopped
	}
	t.giveTurn()
	n, err := t.Conn.Read(b[:min(len(b), t.in.missingBytes())])
	if perr := t.in.passBytes(b[:n], t.secrets.haveBoth()); perr != nil {
		return 0, perr
	}
	if err == nil && len(t.in.part) == 0 { // a record is complete
		err = t.takeTurn()
	}
	return n, err
}

func (t *socketTap) Write(b []byte) (int, error) {
	if t.stopped {
		return 0, errStopped
	}
	if err := t.out.passBytes(b, t.secrets.haveBoth()); err != nil {
		return 0, err
	}
	return t.Conn.Write(b)
}

// trafficSecrets takes the traffic secrets from the key log of crypto/tls. Its format
// is that of draft-ietf-tls-keylogfile: label, client random, secret.
type trafficSecrets struct{ client, server []byte }

func (s *trafficSecrets) haveBoth() bool { return s.client != nil && s.server != nil }

// Write implements io.Writer.
func (s *trafficSecrets) Write(line []byte) (int, error) {
	f := bytes.Fields(line)
	if len(f) != 3 {
		return 0, errors.New("key log: unexpected line")
	}
	secret, err := hex.DecodeString(string(f[2]))
	if err != nil {
		return 0, errors.New("key log: unexpected secret")
	}
	switch string(f[0]) {
	case "CLIENT_TRAFFIC_SECRET_0":
		s.client = secret
	case "SERVER_TRAFFIC_SECRET_0":
		s.server = secret
	}
	return len(line), nil
}
