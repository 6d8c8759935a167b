package nbd

import (
	"encoding/binary"
	"fmt"
	"io"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

const (
	magicServer   = 0x4e42444d41474943 // "NBDMAGIC"
	magicOption   = 0x49484156454f5054 // "IHAVEOPT"
	magicOptReply = 0x0003e889045565a9

	flagFixed   = 1 << 0 // newstyle with replies to options
	flagsKnown  = 1<<0 | 1<<1
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
	var b [18]byte
	if _, err := io.ReadFull(rw, b[:]); err != nil {
		return l, fmt.Errorf("read greeting: %w", err)
	}
	if binary.BigEndian.Uint64(b[:]) != magicServer || binary.BigEndian.Uint64(b[8:]) != magicOption ||
		binary.BigEndian.Uint16(b[16:])&flagFixed == 0 {
		return l, fmt.Errorf("greeting % x is not that of a newstyle NBD server", b)
	}
	hello := binary.BigEndian.AppendUint32(nil, uint32(binary.BigEndian.Uint16(b[16:])&flagsKnown))
	if _, err := rw.Write(append(hello, request(name)...)); err != nil {
		return l, err
	}
	// A server that sends no block sizes accepts any range.
	l = blk.Limits{LogicalBlockSize: blk.SectorSize, MaxIOSize: 32 << 20}
	for {
		kind, data, err := reply(rw)
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
	b := binary.BigEndian.AppendUint64(nil, magicOption)
	b = binary.BigEndian.AppendUint32(b, optGo)
	b = binary.BigEndian.AppendUint32(b, uint32(4+len(name)+2+2))
	b = binary.BigEndian.AppendUint32(b, uint32(len(name)))
	b = append(b, name...)
	b = binary.BigEndian.AppendUint16(b, 1)
	return binary.BigEndian.AppendUint16(b, infoBlock)
}

func reply(r io.Reader) (kind uint32, data []byte, err error) {
	var h [20]byte
	if _, err := io.ReadFull(r, h[:]); err != nil {
		return 0, nil, fmt.Errorf("read reply to GO: %w", err)
	}
	n := binary.BigEndian.Uint32(h[16:])
	if binary.BigEndian.Uint64(h[:]) != magicOptReply || binary.BigEndian.Uint32(h[8:]) != optGo || n > maxOptReply {
		return 0, nil, fmt.Errorf("reply to GO is garbage: % x", h)
	}
	data = make([]byte, n)
	if _, err := io.ReadFull(r, data); err != nil {
		return 0, nil, fmt.Errorf("read reply to GO: %w", err)
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
