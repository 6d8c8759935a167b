package server

import (
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Errnos of the protocol, and those that the wire has no room for, are EIO from a disk.
func TestStorageDoesNotSpeakTheErrnosOfTheProtocol(t *testing.T) {
	for n, want := range map[syscall.Errno]blk.Errno{
		0: blk.OK, syscall.ENOSPC: blk.ENOSPC, syscall.ETIMEDOUT: blk.ETIMEDOUT, syscall.EAGAIN: blk.EAGAIN,
		syscall.ENOTCONN: blk.EIO, syscall.ECONNABORTED: blk.EIO, syscall.EREMCHG: blk.EIO, 512: blk.EIO, 1 << 20: blk.EIO,
	} {
		if got := storageErrno(uint32(n)); got != want {
			t.Errorf("%d: %d, want %d", n, got, want)
		}
	}
}

// A server goes on without a lock only where the file system has none.
func TestGuardWithoutALock(t *testing.T) {
	for errno, left := range map[syscall.Errno]bool{
		syscall.EMFILE: false, syscall.ENFILE: false, syscall.ENOMEM: false, syscall.ENOLCK: false, syscall.EIO: false,
		syscall.EOPNOTSUPP: true, syscall.ENOSYS: true, syscall.EROFS: true,
	} {
		if got := isOneOf(errno, leftToPlugin) || isOneOf(errno, withoutLocks); got != left {
			t.Errorf("%v: goes on %t, want %t", errno, got, left)
		}
	}
}

// A device whose writes a hand-over would lose is not opened during one.
func TestHandOverRefusesOpensOfDevicesThatItWouldLose(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	r := newRig(t, mem)
	r.server.leaving.Store(true) // the look of HandOver has found nothing
	i := r.connect("s")
	if _, err := i.open("a", blk.ReadWrite); blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("OPEN during a hand-over: %v, want EBUSY", err)
	}
	r.server.leaving.Store(false)
	if _, err := i.open("a", blk.ReadWrite); err != nil {
		t.Errorf("OPEN afterwards: %v", err)
	}
}
