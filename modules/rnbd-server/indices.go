package server

import (
	"fmt"
	"syscall"
)

// indices are the numbers under which a plugin's process knows its devices. One
// that was given back is used again as late as possible.
type indices struct {
	next    uint32
	taken   map[uint32]bool
	spoiled map[uint32]uint32 // the generation of processes that may still know it
}

const (
	// fewIndices go round while there are few devices: a process copies the table
	// of its devices with each that comes or goes.
	fewIndices = 4096
	// allIndices is what a process takes (package plugin).
	allIndices = 1 << 16
)

// take returns an index for a device of a process of the generation. EMFILE: all
// are in use.
func (x *indices) take(generation uint32) (uint32, error) {
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

// give takes an index back.
func (x *indices) give(i uint32) {
	delete(x.taken, i)
	delete(x.spoiled, i)
}

// spoil keeps the index i from being used as long as the process of the
// generation runs, which may open it yet, or not have closed it.
func (x *indices) spoil(i, generation uint32) { x.spoiled[i] = generation }
