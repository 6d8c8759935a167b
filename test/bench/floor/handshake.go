package main

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// The part of NBD that its clients need is the fixed newstyle handshake with
// NBD_OPT_GO and structured replies, and READ, WRITE and DISC.

// handshake returns when the client has asked for the disk.
func handshake(conn net.Conn, size uint64) error {
	hello := nbdwire.AppendGreeting(nil, nbdwire.FlagFixedNewstyle|nbdwire.FlagNoZeroes)
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
		if option == nbdwire.OptExportName || option == nbdwire.OptAbort {
			return fmt.Errorf("option %d is not served", option)
		}
		if _, err := conn.Write(answers(option, size)); err != nil {
			return err
		}
		if option == nbdwire.OptGo {
			return nil
		}
	}
}

// answers are the replies to an option.
func answers(option uint32, size uint64) []byte {
	reply := func(b []byte, kind uint32, data []byte) []byte {
		return nbdwire.AppendOptionReply(b, option, kind, data)
	}
	switch option {
	case nbdwire.OptStructuredReply:
		return reply(nil, nbdwire.RepAck, nil)
	case nbdwire.OptGo:
		export := nbdwire.AppendExportInfo(nil, size, nbdwire.HasFlags)
		blocks := nbdwire.AppendBlockSizeInfo(nil, 1, 4096, 1<<20)
		return reply(reply(reply(nil, nbdwire.RepInfo, export), nbdwire.RepInfo, blocks), nbdwire.RepAck, nil)
	}
	return reply(nil, nbdwire.RepErrUnsup, nil)
}
