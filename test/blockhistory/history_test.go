package blockhistory

import (
	"strings"
	"testing"
)

// op is a request of one block: a write of a value, or a read that returned it.
// end 0: no answer.
type op struct {
	value      uint64
	begin, end int64
	write      bool
}

func w(value uint64, begin, end int64) op { return op{value, begin, end, true} }
func r(value uint64, begin, end int64) op { return op{value, begin, end, false} }

func TestJudge(t *testing.T) {
	for _, c := range []struct {
		name string
		ops  []op
		ok   bool
	}{
		{"nothing", nil, true},
		{"a read returns the beginning", []op{r(0, 1, 2)}, true},
		{"a read returns the write before it", []op{w(1, 1, 2), r(1, 3, 4)}, true},
		{"a read returns what was overwritten", []op{w(1, 1, 2), w(2, 3, 4), r(1, 5, 6)}, false},
		{"a read misses an acknowledged write", []op{w(1, 1, 2), r(0, 3, 4)}, false},
		{"a read returns a write under way", []op{w(1, 1, 9), r(1, 3, 4)}, true},
		{"a read returns the value before a write under way", []op{w(1, 1, 9), r(0, 3, 4)}, true},
		{"the beginning comes back while a write is under way", []op{w(1, 1, 9), r(1, 2, 3), r(0, 4, 5)}, false},
		{"two writes at the same time, either is last", []op{w(1, 1, 9), w(2, 1, 9), r(1, 10, 11)}, true},
		{"two writes at the same time, both are last", []op{w(1, 1, 9), w(2, 1, 9), r(1, 10, 11), r(2, 12, 13)}, false},
		{"reads at the same time differ", []op{w(1, 1, 9), r(1, 2, 8), r(0, 2, 8)}, true},
		{"a write without answer never happens", []op{w(1, 1, 2), w(2, 3, 0), r(1, 5, 6)}, true},
		{"a write without answer happens late", []op{w(1, 1, 2), w(2, 3, 0), r(1, 5, 6), r(2, 7, 8)}, true},
		{"a write without answer happens twice", []op{w(1, 1, 0), r(1, 2, 3), w(2, 4, 5), r(2, 6, 7), r(1, 8, 9)}, true},
		{"a write under way happens twice", []op{w(1, 1, 20), r(1, 2, 3), w(2, 4, 5), r(2, 6, 7), r(1, 8, 9)}, true},
		{"a write happens again after its answer", []op{w(1, 1, 4), r(1, 2, 3), w(2, 5, 6), r(2, 7, 8), r(1, 9, 10)}, false},
		{"a write that ended before happens again while another is under way", []op{w(1, 1, 2), w(2, 3, 9), r(2, 4, 5), r(1, 6, 7)}, false},
		{"two writes under way take turns", []op{w(1, 1, 20), w(2, 1, 20), r(1, 2, 3), r(2, 4, 5), r(1, 6, 7), r(2, 8, 9)}, true},
		{"they go on to after their end", []op{w(1, 1, 20), w(2, 1, 20), r(1, 21, 22), r(2, 24, 25), r(1, 26, 27)}, false},
		{"a write without answer overwrites a later one", []op{w(1, 1, 0), w(2, 4, 5), r(1, 8, 9)}, true},
		{"a value is read before its write", []op{r(1, 1, 2), w(1, 3, 4)}, false},
		{"a write within the life of another value", []op{w(1, 1, 2), w(2, 4, 5), r(1, 3, 9), r(1, 10, 11)}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			writes := map[uint64]*written{0: {begin: -2, ack: -1}}
			for _, o := range c.ops {
				if o.write {
					writes[o.value] = &written{begin: o.begin, ack: o.end}
					if o.end == 0 {
						writes[o.value].ack = never
					}
				}
			}
			for _, o := range c.ops {
				if w := writes[o.value]; o.write {
				} else if o.begin > w.ack {
					w.late = max(w.late, o.begin)
				} else {
					w.during = append(w.during, span{o.begin, o.end})
				}
			}
			if err := judge(writes); (err == nil) != c.ok {
				t.Errorf("judged %v, want ok: %v", err, c.ok)
			}
		})
	}
}

func TestReadsAreIdentified(t *testing.T) {
	h := New(64, 7)
	buf := make([]byte, 3*64)
	h.BeginWrite(5, buf).Done()
	read := func(edit func([]byte)) error {
		b := append([]byte(nil), buf...)
		edit(b)
		return h.BeginRead(5, 3).Done(b)
	}
	for _, c := range []struct {
		name string
		edit func([]byte)
		want string
	}{
		{"as written", func([]byte) {}, ""},
		{"a bit has changed", func(b []byte) { b[64+50] ^= 4 }, "block 6 holds garbage at byte 32"},
		{"another block's content", func(b []byte) { copy(b, b[64:128]) }, "block 5 holds garbage"},
		{"half of the block is as before", func(b []byte) { clear(b[32:64]) }, "block 5 is torn"},
		{"zeroes, as before", func(b []byte) { clear(b) }, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := read(c.edit)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	if err := h.Judge(); err == nil {
		t.Error("zeroes after an acknowledged write are not noticed")
	}
	if n := h.Judged(); n != 4*3 {
		t.Errorf("%d blocks judged", n)
	}
}
