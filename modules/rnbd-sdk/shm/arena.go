package shm

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Kind is how an arena's memory is held.
type Kind uint8

const (
	// Plain memory is committed on use and can be given back by Punch.
	Plain Kind = iota
	// Pinned memory is locked, fit for registration with hardware, and never
	// punched.
	Pinned
)

func (k Kind) String() string {
	if k == Pinned {
		return "pinned"
	}
	return "plain"
}

// Arena is payload memory shared by host and plugin.
type Arena struct {
	name string
	kind Kind
	mem  []byte
	fd   int
}

// NewArena makes an arena of size bytes. The error for a Pinned one that does
// not fit the limit of locked memory names the number needed.
func NewArena(name string, size int, kind Kind) (*Arena, error) {
	if size <= 0 {
		return nil, fmt.Errorf("new arena %q: size %d", name, size)
	}
	fd, err := sealedMemfd("rnbd-"+name, size)
	if err != nil {
		return nil, fmt.Errorf("new arena: %w", err)
	}
	a, err := mapArena(fd, size)
	if err != nil {
		return nil, fmt.Errorf("new arena %q: %w", name, err)
	}
	a.name, a.kind = name, kind
	if kind == Pinned {
		if err := pin(a.mem); err != nil {
			a.Close()
			return nil, fmt.Errorf("new arena %q: %w", name, err)
		}
	}
	return a, nil
}

// OpenArena maps size bytes of the arena behind fd, which must be sealed and
// at least that long. It owns fd from the call on and closes it on failure too.
func OpenArena(fd int, size int) (*Arena, error) {
	have, err := checkSealed(fd)
	if err == nil && (size <= 0 || int64(size) > have) {
		err = fmt.Errorf("descriptor %d has %d bytes, want %d", fd, have, size)
	}
	if err != nil {
		closeAll(fd)
		return nil, fmt.Errorf("open arena: %w", err)
	}
	a, err := mapArena(fd, size)
	if err != nil {
		return nil, fmt.Errorf("open arena: %w", err)
	}
	return a, nil
}

// mapArena owns fd, on failure too.
func mapArena(fd, size int) (*Arena, error) {
	mem, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("map %d bytes: %w", size, err)
	}
	// Payload is of no use in a core dump, and writing it would delay the
	// end of a crashed process. Refused by no kernel; harmless if it were.
	unix.Madvise(mem, unix.MADV_DONTDUMP)
	return &Arena{fd: fd, mem: mem}, nil
}

func pin(mem []byte) error {
	err := unix.Mlock(mem)
	if err == nil {
		return nil
	}
	var lim unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &lim) != nil {
		return fmt.Errorf("lock %d bytes: %w", len(mem), err)
	}
	return fmt.Errorf("lock memory: this arena needs %d bytes, the limit of the process (RLIMIT_MEMLOCK) is %d: %w",
		len(mem), lim.Cur, err)
}

// Bytes returns the arena's memory, valid until Close.
func (a *Arena) Bytes() []byte { return a.mem }

// FD returns the descriptor to hand to the peer. It stays the arena's.
func (a *Arena) FD() int { return a.fd }

// Size returns the arena's length in bytes.
func (a *Arena) Size() int { return len(a.mem) }

// Kind tells how the memory is held; an opened arena says Plain.
func (a *Arena) Kind() Kind { return a.kind }

// ErrPinned is returned by Punch of a pinned arena.
var ErrPinned = errors.New("arena is pinned")

// Punch gives the memory of n bytes at off back to the system; they read as
// zero. The caller guarantees that nothing is in flight there and that no
// device holds the range registered: it would go on using the lost pages.
func (a *Arena) Punch(off, n int) error {
	if off < 0 || n <= 0 || n > len(a.mem) || off > len(a.mem)-n {
		return fmt.Errorf("punch arena %q: %d bytes at %d of %d: %w", a.name, n, off, len(a.mem), unix.EINVAL)
	}
	if a.kind == Pinned {
		return fmt.Errorf("punch arena %q: %w", a.name, ErrPinned)
	}
	err := unix.Fallocate(a.fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(off), int64(n))
	if err != nil {
		return fmt.Errorf("punch arena %q: %d bytes at %d: %w", a.name, n, off, err)
	}
	return nil
}

// Close unmaps the memory and closes the descriptor. Slices of Bytes must not
// be used after it.
func (a *Arena) Close() error {
	if a.mem == nil {
		return nil
	}
	err := unix.Munmap(a.mem)
	a.mem = nil
	err = errors.Join(err, unix.Close(a.fd))
	a.fd = -1
	return err
}
