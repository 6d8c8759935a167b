package fence

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// Owner is a slot that no plugin takes. It is the host's and lasts from one of
// its plugin's processes to the next (doc.go).
const Owner = 1 << 24

// base is the offset of slot 0: far beyond the end of any file or device.
const base = 1 << 62

// Locks are asked for again at growing intervals, so that a waiting caller can
// be cancelled and holds no thread.
const (
	retryFirst = time.Millisecond
	retryMost  = 10 * time.Millisecond
)

// Lock waits until no other open file description holds the given slot of f's
// file, then takes it for f's description. It returns ctx's error, wrapped,
// when ctx ends first.
//
// A description that cannot write cannot hold a write lock. It takes a shared
// lock on the slot after every other holder is gone: that keeps out a later
// writer, and tells it when the last read has ended, but two readers of one
// slot that start at the same moment both get it.
func Lock(ctx context.Context, f *os.File, slot uint32) error {
	wait := retryFirst
	for {
		granted, err := try(f, slot)
		if err != nil {
			return fmt.Errorf("fence %s slot %d: %w", f.Name(), slot, err)
		}
		if granted {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("fence %s slot %d: still held by earlier I/O: %w", f.Name(), slot, context.Cause(ctx))
		case <-time.After(wait):
		}
		wait = min(2*wait, retryMost)
	}
}

// Free reports whether no other description of f's file holds the slot of any
// plugin: nothing of earlier processes can reach the store any more. f needs no
// permission to write.
func Free(f *os.File) (free bool, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false, err
	}
	probe := span(unix.F_WRLCK, 0)
	probe.Len = Owner
	if cerr := raw.Control(func(fd uintptr) { err = fcntl(fd, unix.F_OFD_GETLK, &probe) }); cerr != nil {
		return false, cerr
	}
	return err == nil && probe.Type == unix.F_UNLCK, err
}

// try asks once.
func try(f *os.File, slot uint32) (granted bool, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false, err
	}
	if cerr := raw.Control(func(fd uintptr) { granted, err = lock(fd, slot) }); cerr != nil {
		return false, cerr
	}
	return granted, err
}

func lock(fd uintptr, slot uint32) (bool, error) {
	mode, err := unix.FcntlInt(fd, unix.F_GETFL, 0)
	if err != nil {
		return false, err
	}
	if mode&unix.O_ACCMODE == unix.O_RDONLY {
		return lockReader(fd, slot)
	}
	return set(fd, unix.F_WRLCK, slot)
}

// lockReader looks for a holder as a writer would, because that look needs no
// permission to write, and then takes the shared lock.
func lockReader(fd uintptr, slot uint32) (bool, error) {
	probe := span(unix.F_WRLCK, slot)
	if err := fcntl(fd, unix.F_OFD_GETLK, &probe); err != nil {
		return false, err
	}
	if probe.Type != unix.F_UNLCK {
		return false, nil
	}
	return set(fd, unix.F_RDLCK, slot)
}

// set takes a lock of the given type. It returns false if another process holds
// it.
func set(fd uintptr, typ int16, slot uint32) (bool, error) {
	l := span(typ, slot)
	err := fcntl(fd, unix.F_OFD_SETLK, &l)
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		return false, nil
	}
	return err == nil, err
}

// span is one byte; Pid stays 0 as open file description locks want it.
func span(typ int16, slot uint32) unix.Flock_t {
	return unix.Flock_t{Type: typ, Whence: unix.SEEK_SET, Start: base + int64(slot), Len: 1}
}

func fcntl(fd uintptr, cmd int, l *unix.Flock_t) error {
	for {
		if err := unix.FcntlFlock(fd, cmd, l); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
