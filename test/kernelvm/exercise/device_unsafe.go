package exercise

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Device is a block device, opened for direct I/O.
type Device struct {
	f    *os.File
	size int64
}

// OpenDevice opens a block device, for reading only or for both.
func OpenDevice(path string, readOnly bool) (*Device, error) {
	flags := unix.O_DIRECT | os.O_RDWR
	if readOnly {
		flags = unix.O_DIRECT | os.O_RDONLY
	}
	f, err := os.OpenFile(path, flags, 0)
	if err != nil {
		return nil, err
	}
	size, err := f.Seek(0, 2)
	if err != nil {
		f.Close()
		return nil, err
	}
	return &Device{f, size}, nil
}

func (d *Device) Size() int64  { return d.size }
func (d *Device) Close() error { return d.f.Close() }

// aligned returns memory that direct I/O takes.
func aligned(n int) []byte {
	b := make([]byte, n+block)
	return b[block-int(uintptr(unsafe.Pointer(&b[0]))%block):][:n]
}

func (d *Device) ReadAt(p []byte, off int64) (int, error) {
	b := aligned(len(p))
	n, err := d.f.ReadAt(b, off)
	copy(p, b[:n])
	return n, err
}

func (d *Device) WriteAt(p []byte, off int64) (int, error) {
	b := aligned(len(p))
	copy(b, p)
	return d.f.WriteAt(b, off)
}

// WriteFUA is a write with RWF_DSYNC: the kernel makes it a write with FUA, or one
// with a flush behind it where the device has no FUA.
func (d *Device) WriteFUA(p []byte, off int64) error {
	b := aligned(len(p))
	copy(b, p)
	n, err := unix.Pwritev2(int(d.f.Fd()), [][]byte{b}, off, unix.RWF_DSYNC)
	if err == nil && n != len(p) {
		err = fmt.Errorf("%d of %d bytes were written", n, len(p))
	}
	return err
}

func (d *Device) Flush() error { return unix.Fdatasync(int(d.f.Fd())) }

// Discard is BLKDISCARD, and WriteZeroes BLKZEROOUT.
func (d *Device) Discard(off, n int64) error     { return d.rangeCall(0x1277, off, n) }
func (d *Device) WriteZeroes(off, n int64) error { return d.rangeCall(0x127f, off, n) }

func (d *Device) rangeCall(call uintptr, off, n int64) error {
	arg := [2]uint64{uint64(off), uint64(n)}
	_, _, e := unix.Syscall(unix.SYS_IOCTL, d.f.Fd(), call, uintptr(unsafe.Pointer(&arg)))
	if e != 0 {
		return e
	}
	return nil
}
