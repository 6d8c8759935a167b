package nbd

import (
	"cmp"
	"crypto/tls"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

const (
	magicServer   = 0x4e42444d41474943 // "NBDMAGIC"
	magicOption   = 0x49484156454f5054 // "IHAVEOPT"
	magicOptReply = 0x0003e889045565a9

	flagFixed   = 1 << 0 // newstyle with replies to options
	flagsKnown  = 1<<0 | 1<<1
	optStartTLS = 5
	optGo       = 7
	repAck      = 1
	repInfo     = 3
	repErrors   = 1 << 31
	repUnknown  = repErrors | 6
	repPolicy   = repErrors | 2
	infoExport  = 0
	infoBlock   = 3
	txReadOnly  = 1 << 1
	maxOptReply = 1 << 16
	maxBlock    = 64 << 10 // of NBD's minimum block size
)

// negotiate asks for an export and returns its limits.
func negotiate(rw io.ReadWriter, name string) (l blk.Limits, err error) {
	hello, err := greeting(rw)
	if err != nil {
		return l, err
	}
	if _, err := rw.Write(append(hello, request(name)...)); err != nil {
		return l, err
	}
	return limits(rw)
}

// negotiateTLS is negotiate with TLS for what follows. It returns the
// connection.
func negotiateTLS(conn net.Conn, cfg *tls.Config, name string) (*tls.Conn, blk.Limits, error) {
	hello, err := greeting(conn)
	if err != nil {
		return nil, blk.Limits{}, err
	}
	if _, err := conn.Write(append(hello, option(optStartTLS, 0)...)); err != nil {
		return nil, blk.Limits{}, err
	}
	if kind, data, err := reply(conn, optStartTLS); err != nil || kind != repAck {
		return nil, blk.Limits{}, fmt.Errorf("the server has no TLS: answer %#x to STARTTLS: %s: %w", kind, data, cmp.Or(err, error(syscall.EPROTO)))
	}
	secure := tls.Client(conn, cfg)
	if err := secure.Handshake(); err != nil {
		return nil, blk.Limits{}, err
	}
	if _, err := secure.Write(request(name)); err != nil {
		return nil, blk.Limits{}, err
	}
	l, err := limits(secure)
	return secure, l, err
}

// greeting reads that of the server and returns the answer.
func greeting(r io.Reader) ([]byte, error) {
	var b [18]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return nil, fmt.Errorf("read greeting: %w", err)
	}
	if binary.BigEndian.Uint64(b[:]) != magicServer || binary.BigEndian.Uint64(b[8:]) != magicOption ||
		binary.BigEndian.Uint16(b[16:])&flagFixed == 0 {
		return nil, fmt.Errorf("greeting % x is not that of a newstyle NBD server", b)
	}
	return binary.BigEndian.AppendUint32(nil, uint32(binary.BigEndian.Uint16(b[16:])&flagsKnown)), nil
}

// limits reads the replies to the request.
func limits(r io.Reader) (blk.Limits, error) {
	// A server that sends no block sizes accepts any range.
	l := blk.Limits{LogicalBlockSize: blk.SectorSize, MaxIOSize: 32 << 20}
	for {
		kind, data, err := reply(r, optGo)
		if err != nil || kind == repAck {
			return l, err
		}
		if err := take(&l, kind, data); err != nil {
			return l, err
		}
	}
}

// request is the option GO, with a question for the sizes of blocks.
func request(name string) []byte {
	b := option(optGo, 4+len(name)+2+2)
	b = binary.BigEndian.AppendUint32(b, uint32(len(name)))
	b = append(b, name...)
	b = binary.BigEndian.AppendUint16(b, 1)
	return binary.BigEndian.AppendUint16(b, infoBlock)
}

// option is the header of an option with so many bytes of data.
func option(number uint32, n int) []byte {
	b := binary.BigEndian.AppendUint64(nil, magicOption)
	b = binary.BigEndian.AppendUint32(b, number)
	return binary.BigEndian.AppendUint32(b, uint32(n))
}

// reply reads one reply to an option.
func reply(r io.Reader, to uint32) (kind uint32, data []byte, err error) {
	var h [20]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return 0, nil, fmt.Errorf("read reply to option %d: %w", to, err)
	}
	n := binary.BigEndian.Uint32(h[16:])
	if binary.BigEndian.Uint64(h[:]) != magicOptReply || binary.BigEndian.Uint32(h[8:]) != to || n > maxOptReply {
		return 0, nil, fmt.Errorf("reply to option %d is garbage: % x", to, h)
	}
	data = make([]byte, n)
	if _, err := io.ReadFull(r, data); err != nil {
		return 0, nil, fmt.Errorf("read reply to option %d: %w", to, err)
	}
	return binary.BigEndian.Uint32(h[12:]), data, nil
}

// take reads one reply that is not the last.
func take(l *blk.Limits, kind uint32, data []byte) error {
	switch {
	case kind == repUnknown:
		return fmt.Errorf("the server refuses: %s: %w", data, syscall.ENOENT)
	case kind == repPolicy:
		return fmt.Errorf("the server refuses: %s: %w", data, syscall.EPERM)
	case kind&repErrors != 0:
		return fmt.Errorf("the server refuses with error %d: %s", kind&^repErrors, data)
	case kind != repInfo || len(data) < 2:
		return fmt.Errorf("unexpected reply %d to GO", kind)
	}
	switch d := data[2:]; binary.BigEndian.Uint16(data) {
	case infoExport:
		if len(d) != 10 {
			return fmt.Errorf("export information of %d bytes", len(d))
		}
		l.Size, l.ReadOnly = binary.BigEndian.Uint64(d), binary.BigEndian.Uint16(d[8:])&txReadOnly != 0
	case infoBlock:
		if len(d) != 12 {
			return fmt.Errorf("block size information of %d bytes", len(d))
		}
		if n := binary.BigEndian.Uint32(d); n == 0 || n > maxBlock || n&(n-1) != 0 {
			return fmt.Errorf("blocks of %d bytes: want a power of two up to %d", n, maxBlock)
		}
		l.LogicalBlockSize = max(blk.SectorSize, binary.BigEndian.Uint32(d))
		l.MaxIOSize = max(l.LogicalBlockSize, binary.BigEndian.Uint32(d[8:])&^(l.LogicalBlockSize-1))
	}
	return nil
}
