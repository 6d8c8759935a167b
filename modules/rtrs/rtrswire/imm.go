package rtrswire

import "math/bits"

// Imm is an immediate value: 4 bits of type, 28 bits of payload.
type Imm uint32

// ImmType is the kind of an immediate.
type ImmType uint8

const (
	ImmIOReq        ImmType = 0 // client -> server: a request lies in a chunk
	ImmIORsp        ImmType = 1 // server -> client: a request is finished
	ImmIORspInv     ImmType = 2 // the same, after a SEND WITH INVALIDATE
	ImmHeartbeat    ImmType = 8 // both directions
	ImmHeartbeatAck ImmType = 9
)

const (
	// ImmPayloadBits of an immediate hold the payload.
	ImmPayloadBits = 28
	// 9 bits of errno and 19 bits of buffer id fill the payload of a response.
	immErrnoBits = 9
	immBufBits   = 19
	immPayload   = 1<<ImmPayloadBits - 1

	// MaxErrno is the largest errno that a response can carry.
	MaxErrno = 1<<immErrnoBits - 1
	// MaxQueueDepth is the largest queue depth: a REP holds it in 16 bits.
	MaxQueueDepth = 1<<16 - 1

	errnoEIO = 5
)

var _ = [1]struct{}{}[ImmPayloadBits-immErrnoBits-immBufBits]

// Type returns the upper 4 bits.
func (i Imm) Type() ImmType { return ImmType(i >> ImmPayloadBits) }

// Payload returns the lower 28 bits.
func (i Imm) Payload() uint32 { return uint32(i) & immPayload }

// The two heartbeat immediates.
const (
	HeartbeatImm    = Imm(ImmHeartbeat) << ImmPayloadBits
	HeartbeatAckImm = Imm(ImmHeartbeatAck) << ImmPayloadBits
)

// BufShift returns the position of the buffer id in a request's payload: the
// id has as many bits as queueDepth-1 needs, the offset has the rest.
func BufShift(queueDepth int) uint { return ImmPayloadBits - CeilLog2(queueDepth) }

// CeilLog2 returns the number of bits needed for n-1: 0 for 1, 9 for 512.
func CeilLog2(n int) uint { return uint(bits.Len(uint(n - 1))) }

// IOReqImm says that the header of a request lies at byte off of chunk buf.
// shift is BufShift of the session's queue depth.
func IOReqImm(shift uint, buf, off int) Imm {
	return Imm(uint32(buf)<<shift|uint32(off)) & immPayload
}

// IOReq splits the payload of a request.
func (i Imm) IOReq(shift uint) (buf, off int) {
	p := i.Payload()
	return int(p >> shift), int(p & (1<<shift - 1))
}

// IORspImm answers the request of buffer buf. errno is positive or 0; one that
// does not fit in 9 bits is sent as EIO. inv says that a SEND WITH INVALIDATE
// went ahead.
func IORspImm(inv bool, errno, buf int) Imm {
	if errno < 0 || errno > MaxErrno {
		errno = errnoEIO
	}
	t := ImmIORsp
	if inv {
		t = ImmIORspInv
	}
	return Imm(t)<<ImmPayloadBits | Imm(errno)<<immBufBits | Imm(buf)&(1<<immBufBits-1)
}

// IORsp splits the payload of a response; errno is positive or 0.
func (i Imm) IORsp() (errno, buf int) {
	p := i.Payload()
	return int(p >> immBufBits), int(p & (1<<immBufBits - 1))
}
