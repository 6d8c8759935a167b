package gso

import (
	"encoding/binary"
	"errors"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

var be = binary.BigEndian

// ErrMalformed is the error of a packet that contradicts its header.
var ErrMalformed = errors.New("malformed packet to be segmented")

// TCP flags of the last segment only (FIN, PSH), and of the first only (CWR).
const (
	flagFIN = 0x01
	flagPSH = 0x08
	flagCWR = 0x80
)

const (
	ipv4Len, ipv6Len = 20, 40
	tcpLen           = 20
	protocolTCP      = 6
)

// parsedPacket is a TCP packet without extension headers.
type parsedPacket struct {
	b       []byte
	v6      bool
	ip, tcp int // lengths of headers
}

func parseTCP(b []byte) (p parsedPacket, err error) {
	p.b = b
	switch {
	case len(b) >= ipv4Len && b[0]>>4 == 4:
		p.ip = int(b[0]&0xf) * 4
		if p.ip < ipv4Len || b[9] != protocolTCP {
			return p, ErrMalformed
		}
	case len(b) >= ipv6Len && b[0]>>4 == 6:
		p.v6, p.ip = true, ipv6Len
		if b[6] != protocolTCP {
			return p, ErrMalformed
		}
	default:
		return p, ErrMalformed
	}
	if len(b) < p.ip+tcpLen {
		return p, ErrMalformed
	}
	p.tcp = int(b[p.ip+12]>>4) * 4
	if p.tcp < tcpLen || len(b) <= p.ip+p.tcp {
		return p, ErrMalformed
	}
	return p, nil
}

// TCP calls each for the segments of the TCP packet b, in order. Each has size
// bytes of payload, the last the rest, and complete checksums. room(n) provides
// the memory of a segment of n bytes. If b is malformed neither function is
// called and the error is ErrMalformed.
func TCP(b []byte, size int, room func(n int) []byte, each func(segment []byte)) error {
	p, err := parseTCP(b)
	if err != nil {
		return err
	}
	head := p.ip + p.tcp
	if size <= 0 {
		return ErrMalformed
	}
	sequence, id, flags := be.Uint32(b[p.ip+4:]), be.Uint16(b[4:]), b[p.ip+13]
	payload := b[head:]
	for n := 0; len(payload) > 0; n++ {
		part := payload[:min(size, len(payload))]
		payload = payload[len(part):]
		s := room(head + len(part))
		copy(s, b[:head])
		copy(s[head:], part)
		f := flags
		if n > 0 {
			f &^= flagCWR
		}
		if len(payload) > 0 {
			f &^= flagFIN | flagPSH
		}
		s[p.ip+13] = f
		be.PutUint32(s[p.ip+4:], sequence+uint32(n*size))
		p.finishSegment(s, id+uint16(n))
		each(s)
	}
	return nil
}

// finishSegment writes the lengths and checksums of a segment, and its identification.
func (p parsedPacket) finishSegment(s []byte, id uint16) {
	addresses := s[12:20]
	if p.v6 {
		be.PutUint16(s[4:], uint16(len(s)-p.ip))
		addresses = s[8:40]
	} else {
		be.PutUint16(s[2:], uint16(len(s)))
		be.PutUint16(s[4:], id)
		s[10], s[11] = 0, 0
		be.PutUint16(s[10:], ^wire.Sum(0, s[:p.ip]))
	}
	segment := s[p.ip:]
	segment[16], segment[17] = 0, 0
	var pseudo [4]byte
	pseudo[1] = protocolTCP
	be.PutUint16(pseudo[2:], uint16(len(segment)))
	be.PutUint16(segment[16:], ^wire.Sum(wire.Sum(wire.Sum(0, addresses), pseudo[:]), segment))
}
