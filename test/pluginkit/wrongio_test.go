package pluginkit

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// lateBy is how late the I/O of a request is that was answered too early.
const lateBy = 10 * time.Millisecond

// carryOut does what a request asks for.
func (d *wrongDisk) carryOut(r *plugin.Request) blk.Errno {
	b := d.b
	if b.is("refuses hints") && r.Flags&blk.Sync != 0 {
		return blk.EINVAL
	}
	switch r.Op {
	case blk.Read:
		if b.is("keeps writes to itself") { // a flush between file and memory would show old data
			d.mu.Lock()
			defer d.mu.Unlock()
		}
		return d.read(r)
	case blk.Write:
		return d.write(r)
	case blk.Flush:
		if b.is("has an empty flush") {
			return blk.OK
		}
		if b.is("refuses a flush with a range") && r.Off != 0 {
			return blk.EINVAL
		}
		err := errors.Join(d.drainPending(), unix.Fdatasync(d.fd))
		if b.is("hides the error of a flush") {
			err = nil
		}
		return blk.ToErrno(err)
	case blk.Discard:
		if err := d.drainPending(); err != nil {
			return blk.ToErrno(err)
		}
		n := int64(r.Len)
		if b.is("discards more than it was asked") {
			n += 4096
		}
		return blk.ToErrno(unix.Fallocate(d.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(r.Off), n))
	case blk.WriteZeroes:
		return d.zeroes(r)
	}
	return blk.EIO
}

func (d *wrongDisk) zeroes(r *plugin.Request) blk.Errno {
	b, keep := d.b, r.Flags&blk.NoUnmap != 0
	if err := d.drainPending(); err != nil {
		return blk.ToErrno(err)
	}
	if b.is("writes no zeroes") && !keep || b.is("writes no zeroes where it must not unmap") && keep {
		return blk.OK
	}
	var err error
	if keep && !b.is("unmaps where it must not") {
		_, err = unix.Pwrite(d.fd, make([]byte, r.Len), int64(r.Off))
	} else {
		err = unix.Fallocate(d.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(r.Off), int64(r.Len))
	}
	if err == nil && r.Flags&blk.FUA != 0 && !b.is("ignores FUA of zeroes") {
		err = unix.Fdatasync(d.fd)
	}
	return blk.ToErrno(err)
}

func (d *wrongDisk) read(r *plugin.Request) blk.Errno {
	b := d.b
	switch {
	case b.is("answers a read too early"):
		go func() {
			time.Sleep(lateBy)
			_, _ = unix.Pread(d.fd, r.Buf, int64(r.Off))
		}()
		return blk.OK
	}
	for done := 0; done < len(r.Buf); {
		n, err := unix.Pread(d.fd, r.Buf[done:], int64(r.Off)+int64(done))
		switch {
		case err == nil && n > 0:
			done += n
		case errors.Is(err, unix.EINTR):
		case b.is("reads zeroes where the medium fails"):
			clear(r.Buf) // as the leg that was never written
			return blk.OK
		case err == nil:
			return blk.EIO
		default:
			return blk.ToErrno(err)
		}
	}
	d.overlay(r)
	return blk.OK
}

func (d *wrongDisk) write(r *plugin.Request) blk.Errno {
	b, fua := d.b, r.Flags&blk.FUA != 0
	switch {
	case b.is("answers a write too early") && !fua:
		go func() {
			time.Sleep(lateBy)
			_, _ = unix.Pwrite(d.fd, r.Buf, int64(r.Off))
		}()
		return blk.OK
	case b.is("keeps writes to itself") && !fua:
		d.keep(r)
		return blk.OK
	case b.is("loses the end of a large write") && r.Len > 512<<10:
		r.Buf = r.Buf[:len(r.Buf)-512]
	case b.is("takes memory for aligned") && r.BufOff%4096 == 512:
		r.Buf = append(make([]byte, 512), r.Buf[:len(r.Buf)-512]...)
	}
	err := d.writeAll(r.Buf, int64(r.Off))
	switch {
	case errors.Is(err, unix.EIO) && b.is("hides a write error"):
		return blk.OK
	case errors.Is(err, unix.ENOSPC) && b.is("makes EIO of no space"):
		return blk.EIO
	case errors.Is(err, unix.EFBIG), err == nil && r.Off+uint64(r.Len) > uint64(d.size.Load()):
		return blk.EIO
	case err == nil && fua && !b.is("ignores FUA"):
		err = unix.Fdatasync(d.fd)
		if b.is("hides the error of FUA") {
			err = nil
		}
	}
	return blk.ToErrno(err)
}

func (d *wrongDisk) writeAll(buf []byte, off int64) error {
	for len(buf) > 0 {
		n, err := unix.Pwrite(d.fd, buf, off)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || d.b.is("takes a short write for a whole one") {
			return err
		}
		buf, off = buf[n:], off+int64(n)
	}
	return nil
}

// keep holds a write in memory until the next flush.
func (d *wrongDisk) keep(r *plugin.Request) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := uint64(0); i < uint64(r.Len); i += 512 {
		d.pending[r.Off+i] = append([]byte(nil), r.Buf[i:i+512]...)
	}
}

// overlay adds the writes of which the file does not know yet.
func (d *wrongDisk) overlay(r *plugin.Request) {
	for i := uint64(0); i < uint64(r.Len) && len(d.pending) > 0; i += 512 {
		if data := d.pending[r.Off+i]; data != nil {
			copy(r.Buf[i:], data)
		}
	}
}

func (d *wrongDisk) drainPending() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for off, data := range d.pending {
		if _, err := unix.Pwrite(d.fd, data, int64(off)); err != nil {
			return err
		}
		delete(d.pending, off)
	}
	return nil
}
