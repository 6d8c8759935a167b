package shm

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// seals of every memory file: its size is fixed, so that a mapping of it cannot
// fault, and no seal against writing can be added.
const seals = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL

// maxMemfdName is the kernel's limit in bytes; the name is for people who
// look into /proc and may be cut.
const maxMemfdName = 249

// sealedMemfd makes a memory file of exactly size bytes, close-on-exec.
func sealedMemfd(name string, size int) (int, error) {
	name = name[:min(len(name), maxMemfdName)]
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|unix.MFD_NOEXEC_SEAL)
	if err == unix.EINVAL { // before Linux 6.3
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	}
	if err != nil {
		return -1, fmt.Errorf("memfd_create %q: %w", name, err)
	}
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("size memfd %q to %d bytes: %w", name, size, err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("seal memfd %q: %w", name, err)
	}
	return fd, nil
}

// checkSealed returns the size of a memory file that carries all seals.
func checkSealed(fd int) (int64, error) {
	got, err := unix.FcntlInt(uintptr(fd), unix.F_GET_SEALS, 0)
	if err != nil {
		return 0, fmt.Errorf("read seals of descriptor %d: %w", fd, err)
	}
	if got&seals != seals {
		return 0, fmt.Errorf("descriptor %d has seals %#x, want %#x", fd, got, seals)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return 0, fmt.Errorf("stat descriptor %d: %w", fd, err)
	}
	return st.Size, nil
}

func newEvent() (int, error) {
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("eventfd: %w", err)
	}
	return fd, nil
}

func setNonblock(fd int) error {
	if err := unix.SetNonblock(fd, true); err != nil {
		return fmt.Errorf("eventfd %d: %w", fd, err)
	}
	return nil
}

// one is the number 1 as eventfd takes it: 64 bits in host order.
var one = binary.NativeEndian.AppendUint64(nil, 1)

// kick wakes the thread that sleeps on the eventfd. It does not block on a full
// counter: that means that an earlier wake-up is still pending.
func kick(fd int) { unix.Write(fd, one) }

// drainEvent takes the token out of an eventfd into b, of 8 bytes; false:
// there was none. b is the caller's, because a local array would escape.
func drainEvent(fd int, b []byte) bool {
	n, _ := unix.Read(fd, b)
	return n == 8
}

func closeAll(fds ...int) error {
	var errs []error
	for _, fd := range fds {
		if fd >= 0 {
			errs = append(errs, unix.Close(fd))
		}
	}
	return errors.Join(errs...)
}
