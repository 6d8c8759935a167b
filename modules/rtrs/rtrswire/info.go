package rtrswire

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
)

// MsgType is the first field of INFO messages, request headers and RKEY_RSP.
type MsgType uint16

const (
	MsgInfoReq MsgType = 0
	MsgInfoRsp MsgType = 1
	MsgWrite   MsgType = 2
	MsgRead    MsgType = 3
	MsgRkeyRsp MsgType = 4
	// MsgFence is ours: see FENCE in docs/extend/protocol/rtrs.md.
	MsgFence MsgType = 0x80
	// These are ours, too: see Challenge there.
	MsgHello     MsgType = 0x81
	MsgChallenge MsgType = 0x82
	MsgProof     MsgType = 0x83
	MsgRefusal   MsgType = 0x84
	// MsgReason is ours, too: see Reasons there.
	MsgReason MsgType = 0x85
)

const (
	// InfoReqLen is the length of an INFO_REQ.
	InfoReqLen = 272
	// InfoRspHdrLen is the length of an INFO_RSP before its descriptors.
	InfoRspHdrLen = 8
	// DescLen is the length of a descriptor.
	DescLen = 16
	// MaxNameLen is the longest session name, without its NUL.
	MaxNameLen = nameField - 1

	nameField = 255
)

// InfoReq carries the name of the session on connection 0.
type InfoReq []byte

// Put writes an INFO_REQ with name, of at most MaxNameLen bytes, over the first
// InfoReqLen bytes.
func (m InfoReq) Put(name string) {
	clear(m[:InfoReqLen])
	le.PutUint16(m, uint16(MsgInfoReq))
	copy(m[2:2+MaxNameLen], name)
}

// Announce writes an announcement of features behind the name. It is for servers that
// announce features themselves; others expect zeros there.
func (m InfoReq) Announce(f Features) { putFeatures(m[2+nameField:], f) }

// Features returns the announced features; 0 if there is no announcement.
func (m InfoReq) Features() Features { return parseFeatures(m[2+nameField:]) }

// Check refuses a message that makes a server close the path.
func (m InfoReq) Check() error {
	switch {
	case len(m) < InfoReqLen:
		return fmt.Errorf("INFO_REQ of %d bytes, want %d", len(m), InfoReqLen)
	case MsgType(le.Uint16(m)) != MsgInfoReq:
		return fmt.Errorf("INFO_REQ with type %d", le.Uint16(m))
	case bytes.IndexByte(m[2:2+nameField], 0) < 0:
		return errors.New("INFO_REQ with a name that does not end")
	case strings.ContainsAny(m.Name(), "/."):
		return fmt.Errorf("INFO_REQ with name %q: '/' and '.' are not allowed", m.Name())
	}
	return nil
}

// Name returns the session's name.
func (m InfoReq) Name() string {
	return cString(m[2 : 2+nameField])
}

// cString returns the bytes before the first NUL.
func cString(b []byte) string {
	if n := bytes.IndexByte(b, 0); n >= 0 {
		b = b[:n]
	}
	return string(b)
}

// Desc names a piece of remote memory.
type Desc struct {
	Addr uint64
	Key  uint32
	Len  uint32 // bytes
}

// PutDesc writes d over the first DescLen bytes of b.
func PutDesc(b []byte, d Desc) {
	le.PutUint64(b, d.Addr)
	le.PutUint32(b[8:], d.Key)
	le.PutUint32(b[12:], d.Len)
}

// GetDesc reads the first DescLen bytes of b.
func GetDesc(b []byte) Desc {
	return Desc{le.Uint64(b), le.Uint32(b[8:]), le.Uint32(b[12:])}
}

// InfoRspLen returns the length of an INFO_RSP with n descriptors.
func InfoRspLen(n int) int { return InfoRspHdrLen + DescLen*n }

// InfoRsp lists the regions of the server's chunks in buffer order.
type InfoRsp []byte

// PutHeader writes the header of an INFO_RSP with n descriptors.
func (m InfoRsp) PutHeader(n int) {
	clear(m[:InfoRspHdrLen])
	le.PutUint16(m, uint16(MsgInfoRsp))
	le.PutUint16(m[2:], uint16(n))
}

// PutDesc writes descriptor i.
func (m InfoRsp) PutDesc(i int, d Desc) { PutDesc(m[InfoRspLen(i):], d) }

// Count returns the number of descriptors.
func (m InfoRsp) Count() int { return int(le.Uint16(m[2:])) }

// Desc returns descriptor i.
func (m InfoRsp) Desc(i int) Desc { return GetDesc(m[InfoRspLen(i):]) }

// Check reports whether m is an INFO_RSP with regions for exactly queueDepth
// chunks of chunkSize bytes.
func (m InfoRsp) Check(queueDepth, chunkSize int) error {
	if len(m) < InfoRspHdrLen || MsgType(le.Uint16(m)) != MsgInfoRsp {
		return fmt.Errorf("INFO_RSP of %d bytes: no header", len(m))
	}
	n := m.Count()
	switch {
	case len(m) < InfoRspLen(n):
		return fmt.Errorf("INFO_RSP of %d bytes for %d descriptors", len(m), n)
	case n == 0 || queueDepth%n != 0:
		return fmt.Errorf("INFO_RSP with %d descriptors for %d chunks", n, queueDepth)
	case chunkSize <= 0 || CeilLog2(n)+CeilLog2(chunkSize) > ImmPayloadBits:
		return fmt.Errorf("INFO_RSP with %d descriptors and chunks of %d bytes: too large for an immediate", n, chunkSize)
	}
	total := uint64(0)
	for i := range n {
		l := m.Desc(i).Len
		if l == 0 || int(l)%chunkSize != 0 {
			return fmt.Errorf("INFO_RSP descriptor %d of %d bytes is not a number of chunks of %d bytes", i, l, chunkSize)
		}
		total += uint64(l)
	}
	if total != uint64(queueDepth)*uint64(chunkSize) {
		return fmt.Errorf("INFO_RSP covers %d bytes, want %d chunks of %d", total, queueDepth, chunkSize)
	}
	return nil
}
