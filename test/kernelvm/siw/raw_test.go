//go:build linux && cgo && ibverbs

package siw

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Bytes of ours, made by hand, against a siw that listens: messages that the
// provider never sends. docs/extend/protocol/iwarp.md has the layouts.

const (
	keyRequest = "MPA ID Req Frame"
	keyReply   = "MPA ID Rep Frame"

	flagMarkers, flagCRC, flagReject, flagEnhanced = 0x80, 0x40, 0x20, 0x10
)

// rawPeer is a TCP connection to siw.
type rawPeer struct {
	t    *testing.T
	conn net.Conn
	siw  *end // its other end, once siw's consumer has accepted
	crc  bool
	msn  uint32
}

// mpa is a request.
func mpa(key string, flags, rev byte, private ...byte) []byte {
	b := append([]byte(key), flags, rev)
	b = binary.BigEndian.AppendUint16(b, uint16(len(private)))
	return append(b, private...)
}

func words(s string) []byte {
	b, err := hex.DecodeString(s)
	if err != nil {
		panic(err)
	}
	return b
}

// answer is a reply of siw's.
type answer struct {
	flags, rev byte
	private    []byte
}

// ask sends a request and waits for the reply. The error is that of the
// connection when there is none.
func ask(t *testing.T, l verbs.Listener, request []byte) (conn net.Conn, a answer, err error) {
	t.Helper()
	conn, err = net.Dial("tcp", l.Addr().String())
	check(t, err)
	t.Cleanup(func() { conn.Close() })
	conn.SetDeadline(time.Now().Add(limit))
	_, err = conn.Write(request)
	check(t, err)
	var head [20]byte
	if _, err = io.ReadFull(conn, head[:]); err != nil {
		return conn, a, err
	}
	if string(head[:16]) != keyReply {
		t.Fatalf("the reply begins with %q", head[:16])
	}
	a = answer{head[16], head[17], make([]byte, binary.BigEndian.Uint16(head[18:]))}
	_, err = io.ReadFull(conn, a.private)
	return conn, a, err
}

// dialRaw connects to siw. Its consumer accepts with "yes".
func dialRaw(t *testing.T, addr netip.Addr, request []byte) (*rawPeer, answer) {
	t.Helper()
	p := &rawPeer{t: t, siw: newEnd(t, "siw", siwAt(t, addr))}
	l := listen(t, p.siw.dev, addr)
	accepted := make(chan error, 1)
	go func() {
		r, err := l.Accept()
		if err == nil {
			err = r.Accept(p.siw.qp, []byte("yes"))
		}
		accepted <- err
	}()
	conn, a, err := ask(t, l, request)
	l.Close()
	p.siw.up = <-accepted == nil
	check(t, err)
	p.conn, p.crc = conn, a.flags&flagCRC != 0
	return p, a
}

// fpdu frames a segment: everything from the DDP control byte on.
func (p *rawPeer) fpdu(segment []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(segment)))
	b = append(b, segment...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	sum := uint32(0)
	if p.crc {
		sum = crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli))
	}
	return binary.LittleEndian.AppendUint32(b, sum)
}

func untagged(ddp, rdmap byte, qn, msn, mo uint32, payload int) []byte {
	b := []byte{ddp, rdmap, 0, 0, 0, 0}
	for _, v := range []uint32{qn, msn, mo} {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	return append(b, make([]byte, payload)...)
}

func tagged(ddp, rdmap byte, stag uint32, to uint64, payload int) []byte {
	b := binary.BigEndian.AppendUint32([]byte{ddp, rdmap}, stag)
	return append(binary.BigEndian.AppendUint64(b, to), make([]byte, payload)...)
}

func (p *rawPeer) say(b []byte) {
	p.t.Helper()
	_, err := p.conn.Write(b)
	check(p.t, err)
}

// settle gets a message through. From then on siw looks at all that comes.
func (p *rawPeer) settle(opening []byte) {
	p.t.Helper()
	p.siw.recv(1, 0, 64)
	if opening != nil {
		p.say(opening)
	}
	time.Sleep(50 * time.Millisecond) // or siw overlooks the first bytes
	p.msn++
	p.say(p.fpdu(untagged(0x41, 0x43, 0, p.msn, 0, 20)))
	for stop := time.Now().Add(limit); ; time.Sleep(time.Millisecond) {
		p.siw.poll()
		if len(p.siw.wcs) > 0 {
			break
		}
		if time.Now().After(stop) {
			p.t.Fatal("siw does not take a message")
		}
	}
	if wc := p.siw.wcs[0]; wc.Op != verbs.OpRecv || wc.Status != verbs.StatusOK || wc.ByteLen != 20 {
		p.t.Fatalf("siw took %+v", wc)
	}
	p.siw.wcs = nil
}

func TestI002_Siw_AnswersByHand(t *testing.T) {
	v4, _ := addresses(t)
	for _, c := range []struct {
		name       string
		request    []byte
		flags, rev byte
		private    string // hex, of the reply
	}{
		{"revision 1", mpa(keyRequest, 0, 1), 0, 1, "796573"},
		{"revision 1 with CRC", mpa(keyRequest, flagCRC, 1, []byte("hi")...), flagCRC, 1, "796573"},
		{"revision 2", mpa(keyRequest, flagEnhanced, 2, words("00080004")...), flagEnhanced, 2, "00100008796573"},
		{"revision 2 with CRC", mpa(keyRequest, flagEnhanced|flagCRC, 2, words("00080004")...), flagEnhanced | flagCRC, 2, "00100008796573"},
		{"no number of reads", mpa(keyRequest, flagEnhanced, 2, words("3fff3fff")...), flagEnhanced, 2, "00800010796573"},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, a := dialRaw(t, v4, c.request)
			if a.flags != c.flags || a.rev != c.rev || fmt.Sprintf("%x", a.private) != c.private {
				t.Fatalf("%+v; want flags %#x, revision %d, private %s", a, c.flags, c.rev, c.private)
			}
			p.settle(nil)
		})
	}
	// The connection must not end before the RTR frame: that crashes the kernel.
	for _, c := range []struct {
		name, words, reply string
		read               bool // the RTR frame is a Read
	}{
		{"A, C and D", "8008c004", "80108008", false},
		{"A and C", "80088004", "80108008", false},
		{"A and D", "80084004", "80104008", true},
	} {
		t.Run("I-005 peer to peer, "+c.name, func(t *testing.T) {
			p, a := dialRaw(t, v4, mpa(keyRequest, flagEnhanced, 2, words(c.words)...))
			opening := p.fpdu(tagged(0xc1, 0x40, 1, 0, 0))
			if c.read {
				rtr := append(untagged(0x41, 0x41, 1, 1, 0, 0), words("00000001"+"0000000000000000"+"00000000"+"00000001"+"0000000000000000")...)
				opening = p.fpdu(rtr)
			}
			time.Sleep(50 * time.Millisecond)
			p.settle(opening)
			if a.flags != flagEnhanced || fmt.Sprintf("%x", a.private) != c.reply+"796573" {
				t.Errorf("%+v; want %s", a, c.reply)
			}
		})
	}
	l := listen(t, siwAt(t, v4), v4)
	defer l.Close()
	for _, c := range []struct {
		name    string
		request []byte
		flags   byte
		private string
	}{
		{"markers, revision 1", mpa(keyRequest, flagMarkers, 1), flagReject, ""},
		{"markers, revision 2", mpa(keyRequest, flagMarkers|flagEnhanced, 2, words("00080004")...), flagReject | flagEnhanced, "00000000"},
		{"enhanced without the words", mpa(keyRequest, flagEnhanced, 2, 1, 2), flagReject | flagEnhanced, ""},
	} {
		t.Run(c.name+" is refused", func(t *testing.T) {
			_, a, err := ask(t, l, c.request)
			if err != nil || a.flags != c.flags || fmt.Sprintf("%x", a.private) != c.private {
				t.Errorf("%+v, %v; want flags %#x, private %s", a, err, c.flags, c.private)
			}
		})
	}
	for name, request := range map[string][]byte{
		"revision 3":                  mpa(keyRequest, flagEnhanced, 3, words("00080004")...),
		"wrong key":                   mpa(keyReply, flagEnhanced, 2, words("00080004")...),
		"257 bytes of private data":   mpa(keyRequest, 0, 1, make([]byte, 257)...),
		"bytes of a frame behind it":  append(mpa(keyRequest, 0, 1), words("000ec14000000001000000000000000000000000")...),
		"half a request, then nobody": []byte(keyRequest[:9]),
	} {
		t.Run(name+" is hung up on", func(t *testing.T) {
			if _, a, err := ask(t, l, request); err == nil {
				t.Errorf("answered with %+v", a)
			} else if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("siw keeps the connection")
			}
		})
	}
}

// TestI009_Siw_TerminatesByHand: siw's Terminate for frames that break a rule,
// in its own layout.
func TestI009_Siw_TerminatesByHand(t *testing.T) {
	v4, _ := addresses(t)
	for _, c := range []struct {
		name  string
		frame func(p *rawPeer) []byte
		want  uint32 // layer, type, code
	}{
		{"I-004 row 1: length shorter than its header", func(p *rawPeer) []byte { return p.fpdu(untagged(0x41, 0x43, 0, 2, 0, 0)[:15]) }, 0x020003},
		{"I-004 row 2: CRC", func(p *rawPeer) []byte {
			b := p.fpdu(untagged(0x41, 0x43, 0, 2, 0, 16))
			b[len(b)-1] ^= 1
			return b
		}, 0x020002},
		{"I-004 row 3: DDP version, tagged", func(p *rawPeer) []byte { return p.fpdu(tagged(0xc2, 0x40, 1, 0, 8)) }, 0x010104},
		{"I-004 row 3: DDP version, untagged", func(p *rawPeer) []byte { return p.fpdu(untagged(0x42, 0x43, 0, 2, 0, 8)) }, 0x010206},
		{"I-004 row 4: RDMAP version", func(p *rawPeer) []byte { return p.fpdu(untagged(0x41, 0x03, 0, 2, 0, 8)) }, 0x000205},
		{"I-004 row 5: Immediate Data", func(p *rawPeer) []byte { return p.fpdu(untagged(0x41, 0x48, 0, 2, 0, 8)) }, 0x000206},
		{"I-004 row 5: opcode F", func(p *rawPeer) []byte { return p.fpdu(untagged(0x41, 0x4f, 0, 2, 0, 8)) }, 0x000206},
		{"I-004 row 6: queue number", func(p *rawPeer) []byte { return p.fpdu(untagged(0x41, 0x43, 3, 2, 0, 8)) }, 0x010201},
		{"I-004 row 7: MSN", func(p *rawPeer) []byte { return p.fpdu(untagged(0x41, 0x43, 0, 9, 0, 8)) }, 0x010203},
		{"I-004 row 9: message offset", func(p *rawPeer) []byte { return p.fpdu(untagged(0x41, 0x43, 0, 2, 4, 8)) }, 0x010204},
		{"I-004 row 17: Read Response to nothing", func(p *rawPeer) []byte { return p.fpdu(tagged(0xc1, 0x42, 1, 0, 8)) }, 0x010000},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, _ := dialRaw(t, v4, mpa(keyRequest, flagEnhanced|flagCRC, 2, words("00080008")...))
			p.settle(nil)
			p.siw.recv(2, 0, 64)
			p.say(c.frame(p))
			var head [26]byte
			if _, err := io.ReadFull(p.conn, head[:]); err != nil {
				t.Fatalf("no Terminate: %v", err)
			}
			if head[3]&0x0f != 7 {
				t.Fatalf("siw says % x", head)
			}
			got := uint32(head[20]&0xf)<<16 | uint32(head[20]>>4)<<8 | uint32(head[21])
			if got != c.want {
				t.Errorf("Terminate %06x, want %06x", got, c.want)
			}
		})
	}
}
