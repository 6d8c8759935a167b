package uring

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// params is the argument of io_uring_setup in the kernel's layout.
type params struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32
	_                                                                      [3]uint32
	sq                                                                     struct {
		head, tail, ringMask, ringEntries, flags, dropped, array, _ uint32
		_                                                           uint64
	}
	cq struct {
		head, tail, ringMask, ringEntries, overflow, cqes, flags, _ uint32
		_                                                           uint64
	}
}

// bufferTable is struct io_uring_rsrc_register.
type bufferTable struct {
	nr, flags     uint32
	_, data, tags uint64
}

const bufferTableSize = int(unsafe.Sizeof(bufferTable{}))

func (b *bufferTable) pointer() unsafe.Pointer { return unsafe.Pointer(b) }

// Compile-time layout.
var (
	_ [unsafe.Sizeof(bufferTable{}) - 32]struct{}
	_ [32 - unsafe.Sizeof(bufferTable{})]struct{}
	_ [unsafe.Sizeof(params{}) - 120]struct{}
	_ [120 - unsafe.Sizeof(params{})]struct{}
	_ [unsafe.Sizeof(SQE{}) - 64]struct{}
	_ [64 - unsafe.Sizeof(SQE{})]struct{}
	_ [unsafe.Offsetof(SQE{}.cmd) - 48]struct{}
	_ [48 - unsafe.Offsetof(SQE{}.cmd)]struct{}
	_ [unsafe.Sizeof(CQE{}) - 16]struct{}
	_ [16 - unsafe.Sizeof(CQE{})]struct{}
)

const offSQEs = 0x10000000 // where mmap finds the submission entries

func setup(entries uint32, p *params) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// enterSyscall may block, so the scheduler is told (no raw system call).
func enterSyscall(fd int, submit, wait, flags uint32) unix.Errno {
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(fd), uintptr(submit), uintptr(wait), uintptr(flags), 0, 0)
	return errno
}

func register(fd int, op uint32, arg unsafe.Pointer, n int) error {
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), uintptr(op), uintptr(arg), uintptr(n), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

func (r *Ring) register(what string, op uint32, arg unsafe.Pointer, n int) error {
	if err := register(r.fd, op, arg, n); err != nil {
		return fmt.Errorf("register io_uring %s: %w", what, err)
	}
	return nil
}

func int32Pointer(p *int32) unsafe.Pointer      { return unsafe.Pointer(p) }
func iovecPointer(p *unix.Iovec) unsafe.Pointer { return unsafe.Pointer(p) }

// Address is where b lies, for payloads of driver commands; b stays reachable
// and in place until the command is done by the caller's care.
func Address(b []byte) uint64 { return addressOf(b) }

func addressOf(b []byte) uint64 {
	return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

func (r *Ring) sqeSize() uint32 {
	if r.flags&setupSQE128 != 0 {
		return 128
	}
	return 64
}

func (r *Ring) mapRings(p *params) (err error) {
	size := max(p.cq.cqes+p.cqEntries*uint32(unsafe.Sizeof(CQE{})), p.sq.array+p.sqEntries*4)
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	if r.mem, err = unix.Mmap(r.fd, 0, int(size), prot, flags); err != nil {
		return fmt.Errorf("map rings: %w", err)
	}
	if r.sqMem, err = unix.Mmap(r.fd, offSQEs, int(p.sqEntries*r.sqeSize()), prot, flags); err != nil {
		return fmt.Errorf("map submission entries: %w", err)
	}
	word := func(off uint32) *atomic.Uint32 { return (*atomic.Uint32)(unsafe.Pointer(&r.mem[off])) }
	r.sqHead, r.sqTail, r.sqFlags = word(p.sq.head), word(p.sq.tail), word(p.sq.flags)
	r.cqHead, r.cqTail = word(p.cq.head), word(p.cq.tail)
	r.cqes = unsafe.Slice((*CQE)(unsafe.Pointer(&r.mem[p.cq.cqes])), p.cqEntries)
	if p.flags&setupNoSQArray == 0 {
		for i := range p.sqEntries { // entry i is always in place i
			word(p.sq.array + 4*i).Store(i)
		}
	}
	return nil
}

func (r *Ring) sqeAt(i uint32) *SQE {
	return (*SQE)(unsafe.Pointer(&r.sqMem[i*r.sqeSize()]))
}

// sqe returns entry i, cleared.
func (r *Ring) sqe(i uint32) *SQE {
	clear(r.sqMem[i*r.sqeSize() : (i+1)*r.sqeSize()])
	return r.sqeAt(i)
}

// Cmd returns the command area of an entry that Next returned: 16 bytes, 80
// with SQE128.
func (r *Ring) Cmd(s *SQE) []byte {
	return unsafe.Slice(&s.cmd[0], int(r.sqeSize())-48)
}

// probeOps asks the kernel for the operations that it knows.
func (r *Ring) probeOps() (known [256]bool, err error) {
	var p struct {
		lastOp, opsLen uint8
		_              [14]byte
		ops            [256]struct {
			op, _ uint8
			flags uint16
			_     uint32
		}
	}
	if err := r.register("probe", registerProbe, unsafe.Pointer(&p), len(p.ops)); err != nil {
		return known, err
	}
	for _, o := range p.ops[:p.opsLen] {
		known[o.op] = o.flags&1 != 0
	}
	return known, nil
}

// transferAt is preadv2 or pwritev2 of one buffer. v belongs to the caller: a
// local one would escape.
func transferAt(trap uintptr, fd int32, v *unix.Iovec, buf []byte, off uint64, flags uint32) int32 {
	v.Base = unsafe.SliceData(buf)
	v.SetLen(len(buf))
	n, _, errno := unix.Syscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(v)), 1, uintptr(off), 0, uintptr(flags))
	v.Base = nil
	return result(n, errno)
}

// rangeIoctl is an ioctl with the argument {offset, length}.
func rangeIoctl(fd int32, req uint, r *[2]uint64) int32 {
	n, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(req), uintptr(unsafe.Pointer(r)))
	return result(n, errno)
}

func result(n uintptr, errno unix.Errno) int32 {
	if errno != 0 {
		return -int32(errno)
	}
	return int32(n)
}
