package shm

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Arena is payload memory that a daemon shares with a plugin: a sealed memfd.
type Arena struct {
	mem []byte
	fd  int
}

// NewArena makes an arena of size bytes. They read as zero. Its memory is
// committed when it is first written.
func NewArena(name string, size int) (*Arena, error) {
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
	return a, nil
}

// OpenArena maps size bytes of the arena behind fd. fd must be sealed and at
// least that long. It owns fd from the call on and closes it on failure too.
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

// Bytes returns the arena's memory, valid until Close.
func (a *Arena) Bytes() []byte { return a.mem }

// FD returns the descriptor to hand to the peer. It stays the arena's.
func (a *Arena) FD() int { return a.fd }

// Size returns the arena's length in bytes.
func (a *Arena) Size() int { return len(a.mem) }

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
