package diskio

import (
	"sync"

	"golang.org/x/sys/unix"
)

const (
	bounceSize = 64 << 10 // larger requests move through it in pieces
	zeroSize   = 1 << 20
)

// newBounce returns page-aligned memory, nil when there is none left.
func newBounce() []byte {
	mem, err := unix.Mmap(-1, 0, bounceSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil
	}
	return mem
}

// zeroMemory is read-only and never touched, so that it is backed by the
// kernel's one zero page.
var zeroMemory = sync.OnceValue(func() []byte {
	mem, err := unix.Mmap(-1, 0, zeroSize, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil
	}
	return mem
})

// zeroes returns at most n bytes of page-aligned zeroes, nil when there is no
// memory.
func zeroes(n uint64) []byte {
	mem := zeroMemory()
	return mem[:min(n, uint64(len(mem)))]
}
