package nbdclient

import (
	"encoding/binary"
	"fmt"
	"io"
	"syscall"
)

const (
	magicServer     = 0x4e42444d41474943
	magicOption     = 0x49484156454f5054
	magicOptReply   = 0x0003e889045565a9
	magicRequest    = 0x25609513
	magicSimple     = 0x67446698
	magicStructured = 0x668e33ef

	optAbort           = 2
	optList            = 3
	optGo              = 7
	optStructuredReply = 8

	repAck      = 1
	repServer   = 2
	repInfo     = 3
	repErrors   = 1 << 31
	infoExport  = 0
	infoBlock   = 3
	maxOptReply = 1 << 20

	cmdRead        = 0
	cmdWrite       = 1
	cmdDisc        = 2
	cmdFlush       = 3
	cmdTrim        = 4
	cmdWriteZeroes = 6

	chunkDone       = 1
	chunkNone       = 0
	chunkOffsetData = 1
	chunkOffsetHole = 2
	chunkErrors     = 1 << 15
)

// Flags of commands.
const (
	FUA    = 1 << 0 // on stable media before the reply
	NoHole = 1 << 1 // WriteZeroes: leave the range allocated
)

// Transmission flags in Info.Flags.
const (
	ReadOnly        = 1 << 1
	SendFlush       = 1 << 2
	SendFUA         = 1 << 3
	Rotational      = 1 << 4
	SendTrim        = 1 << 5
	SendWriteZeroes = 1 << 6
	CanMultiConn    = 1 << 8
)

// optError is the server's refusal of an option.
type optError struct {
	option, code uint32
	message      string
}

func (e *optError) Error() string {
	return fmt.Sprintf("server refuses option %d with error %d: %s", e.option, e.code&^repErrors, e.message)
}

// optReply is one reply to an option.
type optReply struct {
	kind uint32
	data []byte
}

// wire is the negotiation phase of a connection.
type wire struct{ io.ReadWriter }

func (w wire) greet() error {
	var b [18]byte
	if _, err := io.ReadFull(w, b[:]); err != nil {
		return fmt.Errorf("read greeting: %w", err)
	}
	if binary.BigEndian.Uint64(b[:]) != magicServer || binary.BigEndian.Uint64(b[8:]) != magicOption {
		return fmt.Errorf("greeting % x is not that of a newstyle NBD server", b)
	}
	flags := binary.BigEndian.Uint16(b[16:])
	if flags&1 == 0 {
		return fmt.Errorf("server does not speak fixed newstyle")
	}
	_, err := w.Write(binary.BigEndian.AppendUint32(nil, uint32(flags&3)))
	return err
}

func (w wire) send(option uint32, data []byte) error {
	b := binary.BigEndian.AppendUint64(nil, magicOption)
	b = binary.BigEndian.AppendUint32(b, option)
	b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
	_, err := w.Write(append(b, data...))
	return err
}

// reply reads one reply to option; a refusal is an error.
func (w wire) reply(option uint32) (optReply, error) {
	var h [20]byte
	if _, err := io.ReadFull(w, h[:]); err != nil {
		return optReply{}, fmt.Errorf("read reply to option %d: %w", option, err)
	}
	n := binary.BigEndian.Uint32(h[16:])
	if binary.BigEndian.Uint64(h[:]) != magicOptReply || binary.BigEndian.Uint32(h[8:]) != option || n > maxOptReply {
		return optReply{}, fmt.Errorf("reply to option %d is garbage: % x", option, h)
	}
	r := optReply{kind: binary.BigEndian.Uint32(h[12:]), data: make([]byte, n)}
	if _, err := io.ReadFull(w, r.data); err != nil {
		return optReply{}, fmt.Errorf("read reply to option %d: %w", option, err)
	}
	if r.kind&repErrors != 0 {
		return r, &optError{option: option, code: r.kind, message: string(r.data)}
	}
	return r, nil
}

// replies reads replies until the acknowledgement.
func (w wire) replies(option uint32, each func(optReply) error) error {
	for {
		r, err := w.reply(option)
		if err != nil || r.kind == repAck {
			return err
		}
		if err := each(r); err != nil {
			return err
		}
	}
}

// structured asks for structured replies; a server without them is fine.
func (w wire) structured() (bool, error) {
	if err := w.send(optStructuredReply, nil); err != nil {
		return false, err
	}
	_, err := w.reply(optStructuredReply)
	if _, refused := err.(*optError); refused {
		return false, nil
	}
	return err == nil, err
}

// open starts the transmission of an export.
func (w wire) open(export string) (Info, error) {
	info := Info{MinBlock: 1, PreferredBlock: 4096, MaxPayload: 32 << 20}
	b := binary.BigEndian.AppendUint32(nil, uint32(len(export)))
	b = append(b, export...)
	b = append(b, 0, 1, 0, infoBlock)
	if err := w.send(optGo, b); err != nil {
		return info, err
	}
	err := w.replies(optGo, func(r optReply) error { return info.take(r) })
	return info, err
}

func (i *Info) take(r optReply) error {
	if r.kind != repInfo || len(r.data) < 2 {
		return fmt.Errorf("unexpected reply %d to GO", r.kind)
	}
	switch d := r.data[2:]; binary.BigEndian.Uint16(r.data) {
	case infoExport:
		if len(d) != 10 {
			return fmt.Errorf("export information of %d bytes", len(d))
		}
		i.Size, i.Flags = binary.BigEndian.Uint64(d), binary.BigEndian.Uint16(d[8:])
	case infoBlock:
		if len(d) != 12 {
			return fmt.Errorf("block size information of %d bytes", len(d))
		}
		i.MinBlock = binary.BigEndian.Uint32(d)
		i.PreferredBlock = binary.BigEndian.Uint32(d[4:])
		i.MaxPayload = binary.BigEndian.Uint32(d[8:])
	}
	return nil
}

// names reads the export names.
func (w wire) names() ([]string, error) {
	if err := w.send(optList, nil); err != nil {
		return nil, err
	}
	var names []string
	err := w.replies(optList, func(r optReply) error {
		if r.kind != repServer || len(r.data) < 4 {
			return fmt.Errorf("unexpected reply %d to LIST", r.kind)
		}
		n := binary.BigEndian.Uint32(r.data)
		if uint64(n) > uint64(len(r.data)-4) {
			return fmt.Errorf("name of %d bytes in a reply of %d", n, len(r.data))
		}
		names = append(names, string(r.data[4:4+n]))
		return nil
	})
	return names, err
}

// errnoOf is the error of a reply; NBD's numbers are those of Linux.
func errnoOf(code uint32) error {
	if code == 0 {
		return nil
	}
	return syscall.Errno(code)
}
