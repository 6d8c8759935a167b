package iwarp

import (
	"bytes"
	"net"
	"os"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tlsrecord"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// recordPeer is a client whose records the test makes. s receives a Write with an
// Immediate into dst.
type recordPeer struct {
	t    *testing.T
	s    *end
	conn net.Conn
	out  *tlsrecord.Sealer
	dst  []byte
	mr   verbs.MR
}

func newRecordPeer(t *testing.T, size int) *recordPeer {
	t.Helper()
	c, s := protectedPair(t)
	for range 3 {
		c.poll()
		s.poll()
	}
	f := os.NewFile(uintptr(dupFD(t, c.q().fd)), "socket")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	p := &recordPeer{t: t, s: s, conn: conn, out: c.q().tls.out}
	p.dst, p.mr = s.region(size, verbs.AccessRemoteWrite)
	s.recv(verbs.RecvWR{ID: 9})
	return p
}

// write sends a record, with padding behind its content. s handles what came.
func (p *recordPeer) write(content []byte, typ byte, padding int) {
	p.t.Helper()
	p.writeRaw(p.record(content, typ, padding))
}

func (p *recordPeer) record(content []byte, typ byte, padding int) []byte {
	inner := append(append(bytes.Clone(content), typ), make([]byte, padding)...)
	last := len(inner) - 1
	b := make([]byte, last+tlsrecord.Overhead)
	p.out.Begin(b, inner[last], last)
	p.out.Add(inner[:last])
	p.out.End()
	return b
}

func (p *recordPeer) writeRaw(b []byte) {
	p.t.Helper()
	before := p.s.dev.Stats().ReceivedBytes
	if _, err := p.conn.Write(b); err != nil {
		p.t.Fatal(err)
	}
	for stop := time.Now().Add(20 * time.Second); p.s.dev.Stats().ReceivedBytes-before < uint64(len(b)); p.s.poll() {
		if time.Now().After(stop) {
			p.t.Fatal("the record was not received")
		}
	}
	p.s.poll()
}

// frame returns the header of a Write of payload, and what stands behind it: the
// tail and an Immediate.
func (p *recordPeer) frame(payload int) (head, tail []byte) {
	head = make([]byte, fpduTagged)
	putTagged(head, opWrite, true, payload, p.mr.RKey(), p.mr.Addr())
	imm := make([]byte, fpduUntagged+immediateLen+crcLen)
	putUntagged(imm, opImmediate, true, immediateLen, 0, 1, 0)
	putImmediate(imm[fpduUntagged:], 5)
	tail = make([]byte, fpduHeader(head).tail())
	return head, append(tail, sealFPDU(imm, false)...)
}

// TestPayloadOpenedToItsPlace cuts a Write into records in many ways, with padding
// and with other records between its parts.
func TestPayloadOpenedToItsPlace(t *testing.T) {
	const size = 5000
	payload := make([]byte, size)
	fill(payload, 3)
	for name, act := range map[string]func(p *recordPeer, head, tail []byte){
		"one record": func(p *recordPeer, head, tail []byte) {
			p.write(bytes.Join([][]byte{head, payload, tail}, nil), tlsrecord.ApplicationData, 0)
		},
		"header alone": func(p *recordPeer, head, tail []byte) {
			p.write(head, tlsrecord.ApplicationData, 0)
			p.write(append(bytes.Clone(payload), tail...), tlsrecord.ApplicationData, 0)
		},
		"header in parts": func(p *recordPeer, head, tail []byte) {
			p.write(head[:5], tlsrecord.ApplicationData, 0)
			p.write(append(bytes.Clone(head[5:]), payload[:1]...), tlsrecord.ApplicationData, 0)
			p.write(payload[1:], tlsrecord.ApplicationData, 0)
			p.write(tail[:1], tlsrecord.ApplicationData, 0)
			p.write(tail[1:], tlsrecord.ApplicationData, 0)
		},
		"padding": func(p *recordPeer, head, tail []byte) {
			p.write(head, tlsrecord.ApplicationData, 100)
			p.write(payload[:2000], tlsrecord.ApplicationData, 1000)
			p.write(payload[2000:2001], tlsrecord.ApplicationData, 6000)
			p.write(append(bytes.Clone(payload[2001:]), tail...), tlsrecord.ApplicationData, 600)
		},
		"a key update": func(p *recordPeer, head, tail []byte) {
			p.write(append(bytes.Clone(head), payload[:10]...), tlsrecord.ApplicationData, 0)
			p.write([]byte{24, 0, 0, 1, 0}, tlsrecord.Handshake, 2000)
			if err := p.out.Update(); err != nil {
				p.t.Fatal(err)
			}
			p.write(append(bytes.Clone(payload[10:]), tail...), tlsrecord.ApplicationData, 0)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := newRecordPeer(t, size+1)
			head, tail := p.frame(size)
			act(p, head, tail)
			if wc := p.s.next(); wc.Op != verbs.OpRecvImm || wc.Status != verbs.StatusOK || wc.ByteLen != size || wc.Imm != 5 {
				t.Errorf("completion %+v", wc)
			}
			if !bytes.Equal(p.dst[:size], payload) || p.dst[size] != 0 {
				t.Error("the payload differs")
			}
		})
	}
}

// TestForgedPayloadIsNotLeft breaks a bit of a record of payload: the connection
// ends, no message is completed, and nothing of the record remains.
func TestForgedPayloadIsNotLeft(t *testing.T) {
	const size = 5000
	for _, where := range []int{0, 1, tlsrecord.HeaderLen, 3000, -1} {
		p := newRecordPeer(t, size)
		head, tail := p.frame(size)
		p.write(head, tlsrecord.ApplicationData, 0)
		b := p.record(append(bytes.Repeat([]byte{7}, size), tail...), tlsrecord.ApplicationData, 0)
		b[(where+len(b))%len(b)] ^= 1
		p.writeRaw(b)
		if wc := p.s.next(); wc.Status == verbs.StatusOK {
			t.Errorf("byte %d: completion %+v", where, wc)
		}
		if !bytes.Equal(p.dst, make([]byte, size)) {
			t.Errorf("byte %d: something is in the region", where)
		}
	}
}

// TestClosedRegionIsNotOpenedTo closes the region between two records of a
// payload.
func TestClosedRegionIsNotOpenedTo(t *testing.T) {
	const size = 5000
	p := newRecordPeer(t, size)
	head, tail := p.frame(size)
	p.write(append(head, 7), tlsrecord.ApplicationData, 0)
	if err := p.mr.Close(); err != nil {
		t.Fatal(err)
	}
	p.write(append(bytes.Repeat([]byte{7}, size-1), tail...), tlsrecord.ApplicationData, 0)
	if want := append([]byte{7}, make([]byte, size-1)...); !bytes.Equal(p.dst, want) {
		t.Error("payload came into a closed region")
	}
}
