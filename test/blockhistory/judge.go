package blockhistory

import (
	"fmt"
	"slices"
	"time"
)

// Every value of a block is written once. Then a history of reads and writes is
// linearizable (Gibbons and Korach, "Testing Shared Memories", 1997) if and only
// if, with a zone for each value, from the first end to the last begin of what
// wrote or read it,
//
//   - no two forward zones (first end before last begin) overlap: in each the
//     block must have had that value all the time;
//   - no backward zone (all others: its requests overlap) lies within a forward
//     one: somewhere in it the block must have had its value.

// Judge returns an error that tells of a block which no order of its requests
// explains.
func (h *History) Judge() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	for block, zones := range h.blocks {
		if err := judge(zones); err != nil {
			return fmt.Errorf("block %d: %w (seed %d)", block, err, h.seed)
		}
	}
	return nil
}

// value is a zone with the stamp of its write.
type value struct {
	stamp uint64
	*zone
}

func (v value) forward() bool { return v.minEnd < v.maxFrom }

func judge(zones map[uint64]*zone) error {
	var forward, backward []value
	for stamp, z := range zones {
		v := value{stamp, z}
		switch {
		case z.ack == never && !z.read: // it may never have happened
		case z.minEnd < z.begin:
			return fmt.Errorf("write %v was read before it was begun", v)
		case v.forward():
			forward = append(forward, v)
		default:
			backward = append(backward, v)
		}
	}
	slices.SortFunc(forward, func(a, b value) int { return int(a.minEnd - b.minEnd) })
	for i := 1; i < len(forward); i++ {
		// Those before do not overlap, so the last of them ends last.
		if a, b := forward[i-1], forward[i]; b.minEnd < a.maxFrom {
			return fmt.Errorf("%v was there, then %v, then the first again", a, b)
		}
	}
	for _, b := range backward {
		i, _ := slices.BinarySearchFunc(forward, b.maxFrom, func(f value, t int64) int {
			if f.minEnd < t {
				return -1
			}
			return 1
		})
		if i > 0 && b.minEnd < forward[i-1].maxFrom {
			return fmt.Errorf("%v was there all the time, and still %v", forward[i-1], b)
		}
	}
	return nil
}

func (v value) String() string {
	at := func(t int64) string { return time.Duration(t).Round(time.Microsecond).String() }
	s := fmt.Sprintf("write %d (begun %s", v.stamp, at(v.begin))
	if v.ack == never {
		s += ", not acknowledged"
	} else {
		s += ", acknowledged " + at(v.ack)
	}
	if v.read {
		s += fmt.Sprintf(", first end %s, last begin %s of write and reads", at(v.minEnd), at(v.maxFrom))
	}
	return s + ")"
}
