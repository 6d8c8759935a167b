package main

import "encoding/binary"

// Messages of the kernel's FUSE protocol, version 7 (include/uapi/linux/fuse.h of
// Linux; the layout is that of a C compiler on a 64-bit machine).

var native = binary.NativeEndian

// Operations that this front end answers. The others get ENOSYS, and the kernel does
// without them.
const (
	opForget      = 2
	opGetattr     = 3
	opSetattr     = 4
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opStatfs      = 17
	opRelease     = 18
	opFsync       = 20
	opFlush       = 25
	opInit        = 26
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42
	opFallocate   = 43
	opLseek       = 46
)

// Sizes of messages in bytes.
const (
	inHeaderSize  = 40
	outHeaderSize = 16
	ioInSize      = 40 // fuse_read_in, fuse_write_in
	initOutSize   = 64
	attrOutSize   = 104
	openOutSize   = 16
	writeOutSize  = 8
	lseekOutSize  = 8
	statfsOutSize = 80
)

// Bits of the negotiation.
const (
	featAsyncRead    = 1 << 0
	featAtomicTrunc  = 1 << 3 // O_TRUNC arrives with the open, and a device ignores it
	featBigWrites    = 1 << 5
	featAsyncDIO     = 1 << 15
	featMaxPages     = 1 << 22
	featInitExt      = 1 << 30
	featDirectMmap   = 1 << 36
	featResend       = 1 << 39
	resentUnique     = 1 << 63 // in the number of a request that is sent again
	notifyResend     = 7
	notifyInvalInode = 2
)

// Bits of the answer to an open.
const (
	openDirectIO       = 1 << 0
	openParallelWrites = 1 << 6
)

const (
	setattrSize = 1 << 3
	setattrMode = 1 << 0
	setattrUID  = 1 << 1
	setattrGID  = 1 << 2
)

// The only file, the root.
const rootNode = 1

const pageSize = 4096

// inMessage is one request of the kernel: a header and the operation's arguments.
type inMessage []byte

func (m inMessage) length() uint32 { return native.Uint32(m) }
func (m inMessage) opcode() uint32 { return native.Uint32(m[4:]) }
func (m inMessage) unique() uint64 { return native.Uint64(m[8:]) }
func (m inMessage) args() []byte   { return m[inHeaderSize:] }

// isValid reports whether the message has n bytes, and arguments of at least size bytes.
func (m inMessage) isValid(n, size int) bool {
	return n >= inHeaderSize+size && m.length() == uint32(n)
}

// argsSize returns the size of the arguments that an operation has at least, in bytes.
func argsSize(opcode uint32) int {
	switch opcode {
	case opInit:
		return 16
	case opGetattr:
		return 16
	case opSetattr:
		return 88
	case opOpen:
		return 8
	case opRead, opWrite:
		return ioInSize
	case opFsync:
		return 16
	case opFallocate:
		return 32
	case opLseek:
		return 24
	}
	return 0
}

// ioArgs are the arguments of a read or a write.
type ioArgs []byte

func (a ioArgs) offset() uint64    { return native.Uint64(a[8:]) }
func (a ioArgs) size() uint32      { return native.Uint32(a[16:]) }
func (a ioArgs) openFlags() uint32 { return native.Uint32(a[32:]) }

// fallocateArgs are the arguments of a fallocate.
type fallocateArgs []byte

func (a fallocateArgs) offset() uint64 { return native.Uint64(a[8:]) }
func (a fallocateArgs) length() uint64 { return native.Uint64(a[16:]) }
func (a fallocateArgs) mode() uint32   { return native.Uint32(a[24:]) }

// lseekArgs are the arguments of a seek for data or a hole.
type lseekArgs []byte

func (a lseekArgs) offset() uint64 { return native.Uint64(a[8:]) }
func (a lseekArgs) whence() uint32 { return native.Uint32(a[16:]) }

// putOutHeader writes the header of a reply with n bytes behind the header. errno is 0
// or a positive errno.
func putOutHeader(b []byte, unique uint64, errno int32, n int) {
	native.PutUint32(b, uint32(outHeaderSize+n))
	native.PutUint32(b[4:], uint32(-errno))
	native.PutUint64(b[8:], unique)
}

// putNotification writes the header of a message to the kernel that answers no request.
func putNotification(b []byte, code uint32, n int) {
	native.PutUint32(b, uint32(outHeaderSize+n))
	native.PutUint32(b[4:], code)
	native.PutUint64(b[8:], 0)
}

// putInitOut writes the answer to the negotiation.
func putInitOut(b []byte, in []byte, maxWrite uint32) {
	const want = featAsyncRead | featAtomicTrunc | featBigWrites | featAsyncDIO | featMaxPages | featInitExt | featDirectMmap | featResend
	offered := uint64(native.Uint32(in[12:]))
	if offered&featInitExt != 0 && len(in) >= 20 {
		offered |= uint64(native.Uint32(in[16:])) << 32
	}
	flags := offered & want
	clear(b[:initOutSize])
	native.PutUint32(b, 7)
	native.PutUint32(b[4:], min(native.Uint32(in[4:]), 41)) // the version with all of the above
	native.PutUint32(b[8:], native.Uint32(in[8:]))          // read-ahead: as the kernel likes
	native.PutUint32(b[12:], uint32(flags))
	native.PutUint16(b[16:], 0xffff) // requests in the background: the device's slots are the limit
	native.PutUint16(b[18:], 0xffff)
	native.PutUint32(b[20:], maxWrite)
	native.PutUint32(b[24:], 1) // time granularity, ns
	native.PutUint16(b[28:], uint16((maxWrite+pageSize-1)/pageSize))
	native.PutUint32(b[32:], uint32(flags>>32))
}

// fileAttr are the attributes of the file.
type fileAttr struct {
	size     uint64
	block    uint32
	uid, gid uint32
	readOnly bool
}

// putAttrOut writes the attributes, valid for this answer only: the size may change.
func putAttrOut(b []byte, a *fileAttr) {
	clear(b[:attrOutSize])
	b = b[16:]
	native.PutUint64(b, rootNode)
	native.PutUint64(b[8:], a.size)
	native.PutUint64(b[16:], a.size/512)
	mode := uint32(0o100600)
	if a.readOnly {
		mode = 0o100400
	}
	native.PutUint32(b[60:], mode)
	native.PutUint32(b[64:], 1) // links
	native.PutUint32(b[68:], a.uid)
	native.PutUint32(b[72:], a.gid)
	native.PutUint32(b[80:], a.block)
}

// putStatfsOut writes the statistics of the file system: the file fills it.
func putStatfsOut(b []byte, size uint64) {
	clear(b[:statfsOutSize])
	native.PutUint64(b, size/pageSize)
	native.PutUint64(b[24:], 1)        // files
	native.PutUint32(b[40:], pageSize) // block size
	native.PutUint32(b[44:], 255)      // length of names
	native.PutUint32(b[48:], pageSize) // fragment size
}
