package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
)

// The part of NBD that its clients need: the fixed newstyle handshake with
// NBD_OPT_GO and structured replies, and READ, WRITE and DISC.
const (
	optExportName, optAbort, optGo, optStructured = 1, 2, 7, 8

	repAck, repInfo, repUnsupported = 1, 3, 1<<31 | 1

	requestHeader = 28
	cmdRead       = 0
	cmdWrite      = 1
	cmdDisc       = 2

	simpleReply = 16
	dataChunk   = 28 // a structured reply's header, and the offset
)

// handshake returns when the client has asked for the disk.
func handshake(conn net.Conn, size uint64) error {
	hello := binary.BigEndian.AppendUint64(nil, 0x4e42444d41474943)
	hello = binary.BigEndian.AppendUint64(hello, 0x49484156454f5054)
	hello = binary.BigEndian.AppendUint16(hello, 3) // fixed newstyle, no zeroes
	if _, err := conn.Write(hello); err != nil {
		return err
	}
	var flags [4]byte
	if _, err := io.ReadFull(conn, flags[:]); err != nil {
		return err
	}
	for {
		var h [16]byte
		if _, err := io.ReadFull(conn, h[:]); err != nil {
			return err
		}
		option := binary.BigEndian.Uint32(h[8:])
		data := make([]byte, min(binary.BigEndian.Uint32(h[12:]), 64<<10))
		if _, err := io.ReadFull(conn, data); err != nil {
			return err
		}
		if option == optExportName || option == optAbort {
			return fmt.Errorf("option %d is not served", option)
		}
		if _, err := conn.Write(answers(option, size)); err != nil {
			return err
		}
		if option == optGo {
			return nil
		}
	}
}

// answers are the replies to an option.
func answers(option uint32, size uint64) []byte {
	reply := func(b []byte, kind uint32, data []byte) []byte {
		b = binary.BigEndian.AppendUint64(b, 0x3e889045565a9)
		b = binary.BigEndian.AppendUint32(b, option)
		b = binary.BigEndian.AppendUint32(b, kind)
		return append(binary.BigEndian.AppendUint32(b, uint32(len(data))), data...)
	}
	switch option {
	case optStructured:
		return reply(nil, repAck, nil)
	case optGo:
		export := binary.BigEndian.AppendUint64([]byte{0, 0}, size)
		export = binary.BigEndian.AppendUint16(export, 1) // has flags, none else
		blocks := []byte{0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 0, 0x10, 0, 0}
		return reply(reply(reply(nil, repInfo, export), repInfo, blocks), repAck, nil)
	}
	return reply(nil, repUnsupported, nil)
}
