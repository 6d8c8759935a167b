package rtrswire

import "errors"

// A request lies in a chunk: data (or room for the reply's data), then the
// user message, then one of these headers.
const (
	WriteHdrLen  = 4
	ReadHdrLen   = 8 // without descriptor
	FenceHdrLen  = 4
	MaxReqHdrLen = ReadHdrLen + DescLen
	// FenceUsrLen is the user message of a FENCE: the sess_uuid of a path.
	FenceUsrLen = 16
)

// NeedInval is the flag of a READ that makes the server invalidate its
// descriptor.
const NeedInval = 0x1

// PutWriteHdr writes the header of a WRITE and returns its length.
func PutWriteHdr(b []byte, usrLen int) int { return putHdr(b, MsgWrite, usrLen) }

// PutFenceHdr writes the header of a FENCE and returns its length.
func PutFenceHdr(b []byte, usrLen int) int { return putHdr(b, MsgFence, usrLen) }

func putHdr(b []byte, t MsgType, usrLen int) int {
	le.PutUint16(b, uint16(t))
	le.PutUint16(b[2:], uint16(usrLen))
	return WriteHdrLen
}

// PutReadHdr writes the header of a READ without descriptor and returns its
// length.
func PutReadHdr(b []byte, usrLen int) int {
	putHdr(b, MsgRead, usrLen)
	le.PutUint32(b[4:], 0)
	return ReadHdrLen
}

// PutReadDescHdr writes the header of a READ that returns its data to d. It
// returns the length of the header.
func PutReadDescHdr(b []byte, usrLen int, needInval bool, d Desc) int {
	putHdr(b, MsgRead, usrLen)
	flags := uint16(0)
	if needInval {
		flags = NeedInval
	}
	le.PutUint16(b[4:], flags)
	le.PutUint16(b[6:], 1)
	PutDesc(b[ReadHdrLen:], d)
	return ReadHdrLen + DescLen
}

// Request is the decoded header of a request.
type Request struct {
	Type      MsgType
	NeedInval bool // only with HasDesc
	HasDesc   bool
	UsrLen    int
	Desc      Desc // where the data of a READ go, if HasDesc
}

// Errors of ParseRequest.
var (
	ErrShort   = errors.New("request header is cut off by the end of the chunk")
	ErrMsgType = errors.New("request header of unknown type")
	ErrSGCount = errors.New("request with more than one descriptor")
)

// ParseRequest decodes the header at the start of b. b is a private copy of the
// bytes behind the user message in the chunk.
func ParseRequest(b []byte) (r Request, err error) {
	if len(b) < WriteHdrLen {
		return r, ErrShort
	}
	r.Type, r.UsrLen = MsgType(le.Uint16(b)), int(le.Uint16(b[2:]))
	switch r.Type {
	case MsgWrite, MsgFence:
		return r, nil
	case MsgRead:
		return r, r.parseRead(b)
	}
	return r, ErrMsgType
}

func (r *Request) parseRead(b []byte) error {
	if len(b) < ReadHdrLen {
		return ErrShort
	}
	switch le.Uint16(b[6:]) {
	case 0:
		return nil
	case 1:
		if len(b) < ReadHdrLen+DescLen {
			return ErrShort
		}
		r.HasDesc = true
		r.NeedInval = le.Uint16(b[4:])&NeedInval != 0
		r.Desc = GetDesc(b[ReadHdrLen:])
		return nil
	}
	return ErrSGCount
}

// RkeyRspLen is the length of an RKEY_RSP.
const RkeyRspLen = 8

// RkeyRsp is the payload of every answer under FlagNewRkey.
type RkeyRsp []byte

// Put writes the next key of buffer buf.
func (m RkeyRsp) Put(buf int, rkey uint32) {
	le.PutUint16(m, uint16(MsgRkeyRsp))
	le.PutUint16(m[2:], uint16(buf))
	le.PutUint32(m[4:], rkey)
}

// Valid reports whether m is an RKEY_RSP for buffer buf.
func (m RkeyRsp) Valid(buf int) bool {
	return len(m) >= RkeyRspLen && MsgType(le.Uint16(m)) == MsgRkeyRsp && m.Buf() == buf
}

// Buf returns the buffer id.
func (m RkeyRsp) Buf() int { return int(le.Uint16(m[2:])) }

// Rkey returns the key for the next use of the buffer.
func (m RkeyRsp) Rkey() uint32 { return le.Uint32(m[4:]) }
