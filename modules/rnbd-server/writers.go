package server

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// writerCounts counts, per node, the mappings that may write. Read-only mappings
// are not counted (docs/extend/protocol/rnbd.md, "Access modes").
type writerCounts map[nodeID]int

// admit admits a mapping in mode m, or returns the reason against it.
func (w writerCounts) admit(id nodeID, m blk.AccessMode) error {
	limit := 0
	switch m {
	case blk.ReadOnly:
		return nil
	case blk.ReadWrite:
		limit = 1
	case blk.Migration:
		limit = 2
	default:
		return fmt.Errorf("access mode %d is unknown: %w", m, syscall.EINVAL)
	}
	if w[id] >= limit {
		return fmt.Errorf("%d mapping(s) may write already, %s is refused: %w", w[id], m, errOtherWriter)
	}
	w[id]++
	return nil
}

// release ends a mapping that take admitted.
func (w writerCounts) release(id nodeID, m blk.AccessMode) {
	if m == blk.ReadOnly {
		return
	}
	if w[id]--; w[id] == 0 {
		delete(w, id)
	}
}
