package rocev2

import (
	"encoding/binary"
	"unsafe"

	"golang.org/x/sys/unix"
)

// mmsghdr is struct mmsghdr: one datagram, or one segmented send, of a call.
type mmsghdr struct {
	hdr unix.Msghdr
	n   uint32
}

const controlLen = 24 // one control message with an int

type controlBuf [controlLen / 8]uint64

func (c *controlBuf) bytes() []byte { return (*[controlLen]byte)(unsafe.Pointer(c))[:] }

// setSegment makes c ask for segments of size bytes.
func (c *controlBuf) setSegment(size int) {
	h := (*unix.Cmsghdr)(unsafe.Pointer(c))
	h.Level, h.Type = unix.SOL_UDP, unix.UDP_SEGMENT
	h.SetLen(unix.CmsgLen(2))
	binary.NativeEndian.PutUint16(c.bytes()[unix.CmsgLen(0):], uint16(size))
}

// segmentSize returns the segment size that the kernel reports in the first n
// bytes of c, or 0 if the datagram is not merged.
func (c *controlBuf) segmentSize(n int) int {
	h := (*unix.Cmsghdr)(unsafe.Pointer(c))
	if n < unix.CmsgLen(4) || h.Level != unix.SOL_UDP || h.Type != unix.UDP_GRO {
		return 0
	}
	return int(int32(binary.NativeEndian.Uint32(c.bytes()[unix.CmsgLen(0):])))
}

// sockaddr is room for the address of a socket of either family.
type sockaddr struct {
	raw unix.RawSockaddrInet6
	n   uint32
}

func (s *sockaddr) setPeer(p peerAddr) {
	port := [2]byte{byte(p.port >> 8), byte(p.port & 0xff)}
	if p.addr.Is4() {
		in := (*unix.RawSockaddrInet4)(unsafe.Pointer(&s.raw))
		*in = unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: p.addr.As4(), Port: binary.NativeEndian.Uint16(port[:])}
		s.n = unix.SizeofSockaddrInet4
		return
	}
	s.raw = unix.RawSockaddrInet6{Family: unix.AF_INET6, Addr: p.addr.As16(), Port: binary.NativeEndian.Uint16(port[:]), Scope_id: p.scope}
	s.n = unix.SizeofSockaddrInet6
}

// peerOf returns the address, as 16 bytes, and the port.
func (s *sockaddr) peerOf() (addr [16]byte, port uint16) {
	var b [2]byte
	if s.raw.Family == unix.AF_INET {
		in := (*unix.RawSockaddrInet4)(unsafe.Pointer(&s.raw))
		addr[10], addr[11] = 0xff, 0xff
		copy(addr[12:], in.Addr[:])
		binary.NativeEndian.PutUint16(b[:], in.Port)
	} else {
		addr = s.raw.Addr
		binary.NativeEndian.PutUint16(b[:], s.raw.Port)
	}
	return addr, uint16(b[0])<<8 | uint16(b[1])
}

// sendMany and receiveMany pass msgs to the socket without blocking. The raw
// system call bypasses the scheduler. That is safe because the call never
// waits.
func sendMany(fd int, msgs []mmsghdr) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&msgs[0])), uintptr(len(msgs)), unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	return int(n), errno
}

func receiveMany(fd int, msgs []mmsghdr) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&msgs[0])), uintptr(len(msgs)), unix.MSG_DONTWAIT, 0, 0)
	return int(n), errno
}

// setMessage makes m a message of iov to or from name, with control when it is
// not nil.
func (m *mmsghdr) setMessage(name *sockaddr, iov []unix.Iovec, control *controlBuf) {
	m.n = 0
	m.hdr = unix.Msghdr{Name: (*byte)(unsafe.Pointer(&name.raw)), Namelen: name.n, Iov: &iov[0]}
	m.hdr.SetIovlen(len(iov))
	if control != nil {
		m.hdr.Control = (*byte)(unsafe.Pointer(control))
		m.hdr.SetControllen(controlLen)
	}
}

// setIovec makes v describe b. b must not be empty.
func setIovec(v *unix.Iovec, b []byte) {
	v.Base = &b[0]
	v.SetLen(len(b))
}

// pieceAddr returns the address of the first byte that v describes.
func pieceAddr(v *unix.Iovec) uint64 { return uint64(uintptr(unsafe.Pointer(v.Base))) }

// growIovec makes v n bytes longer. They must follow it in memory.
func growIovec(v *unix.Iovec, n int) { v.SetLen(int(v.Len) + n) }
