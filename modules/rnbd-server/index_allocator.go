package server

import (
	"fmt"
	"syscall"
)

// indexAllocator are the numbers of a plugin's devices. A number that was given back
// is used again as late as possible.
type indexAllocator struct {
	next    uint32
	taken   map[uint32]bool
	spoiled map[uint32]uint32 // by number, the generation of processes that may still know it
}

const (
	// fewIndices are used in turn while there are few devices. The number is
	// small because a process copies its table of devices whenever one comes or
	// goes.
	fewIndices = 4096
	// allIndices is the largest number of indices in a process (package
	// plugin).
	allIndices = 1 << 16
)

// alloc returns an index for a device in a process of the generation. The error
// is EMFILE if all are in use.
func (x *indexAllocator) alloc(generation uint32) (uint32, error) {
	if x.taken == nil {
		x.taken, x.spoiled = map[uint32]bool{}, map[uint32]uint32{}
	}
	for _, n := range []uint32{fewIndices, allIndices} {
		if n < allIndices && len(x.taken) > int(n)/2 {
			continue
		}
		for range n {
			i := x.next % n
			x.next = i + 1
			if g, bad := x.spoiled[i]; !x.taken[i] && !(bad && g == generation) {
				x.taken[i] = true
				return i, nil
			}
		}
	}
	return 0, fmt.Errorf("it has %d devices open, and takes no more: %w", len(x.taken), syscall.EMFILE)
}

// free takes an index back.
func (x *indexAllocator) free(i uint32) {
	delete(x.taken, i)
	delete(x.spoiled, i)
}

// reserveUntil keeps the index i from being used while the process of the generation
// runs, since that process may still open it, or not have closed it.
func (x *indexAllocator) reserveUntil(i, generation uint32) { x.spoiled[i] = generation }
