package blockhistory

import (
	"cmp"
	"fmt"
	"slices"
	"time"
)

// If every value of a block is written once, each value has a zone: from the
// first end to the last begin among the operations that wrote or read it. A
// history of reads and writes is then linearizable (Gibbons and Korach,
// "Testing Shared Memories", 1997) if and only if
//
//   - no two forward zones (first end before last begin) overlap: in each the
//     block must have had that value all the time;
//   - no backward zone (all others: its requests overlap) lies within a forward
//     one: somewhere in it the block must have had its value.
//
// Here a write may happen several times while it is under way. Those are as many
// values: one for each read that began before the write's end, and one for all
// that began later.

// Judge returns an error about a block if no order of its requests explains
// it.
func (h *History) Judge() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for block, writes := range h.blocks {
		if err := judge(writes); err != nil {
			return fmt.Errorf("block %d: %w (seed %d)", block, err, h.seed)
		}
	}
	return nil
}

// zone is one value.
type zone struct {
	stamp uint64
	of    *written
	from  int64 // first end
	to    int64 // last begin
}

func judge(writes map[uint64]*written) error {
	var forward, backward []zone
	for stamp, w := range writes {
		for _, r := range w.during {
			if r.end < w.begin {
				return fmt.Errorf("write %d was read before it was begun", stamp)
			}
			backward = append(backward, zone{stamp, w, min(w.ack, r.end), max(w.begin, r.begin)})
		}
		switch {
		case w.late > 0:
			forward = append(forward, zone{stamp, w, w.ack, w.late})
		case len(w.during) == 0 && w.ack != never: // it has happened, seen or not
			backward = append(backward, zone{stamp, w, w.ack, w.begin})
		}
	}
	slices.SortFunc(forward, func(a, b zone) int { return cmp.Compare(a.from, b.from) })
	for i := 1; i < len(forward); i++ {
		// Those before do not overlap, so the last of them ends last.
		if a, b := forward[i-1], forward[i]; b.from < a.to {
			return fmt.Errorf("%v was there, then %v, then the first again", a, b)
		}
	}
	for _, b := range backward {
		i, _ := slices.BinarySearchFunc(forward, b.to, func(f zone, t int64) int { return cmp.Compare(f.from, t) })
		if i > 0 && b.from < forward[i-1].to {
			return fmt.Errorf("%v was there all the time, and still %v", forward[i-1], b)
		}
	}
	return nil
}

func (z zone) String() string {
	at := func(t int64) string { return time.Duration(t).Round(time.Microsecond).String() }
	s := fmt.Sprintf("write %d (begun %s", z.stamp, at(z.of.begin))
	if z.of.ack == never {
		s += ", not acknowledged"
	} else {
		s += ", acknowledged " + at(z.of.ack)
	}
	return s + fmt.Sprintf(", seen between %s and %s)", at(min(z.from, z.to)), at(max(z.from, z.to)))
}
