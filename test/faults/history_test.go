package faults

import (
	"strings"
	"testing"
)

// fake is a disk of one history that a test makes faulty.
type fake struct {
	t    *testing.T
	h    *History
	data [][]byte
}

func newFake(t *testing.T) *fake {
	f := &fake{t: t, h: NewHistory(4, 128, 7)}
	for range f.h.Blocks() {
		f.data = append(f.data, make([]byte, f.h.BlockSize()))
	}
	return f
}

// begin starts a write that has not reached the disk.
func (f *fake) begin(block int) (Stamp, []byte) {
	buf := make([]byte, f.h.BlockSize())
	return f.h.Begin(block, buf), buf
}

// write is a write that works.
func (f *fake) write(block int) (Stamp, []byte) {
	s, buf := f.begin(block)
	copy(f.data[block], buf)
	f.h.Acknowledge(block, s)
	return s, buf
}

func (f *fake) read(block int) error {
	return f.h.Check(block, f.h.Reading(block), f.data[block])
}

// mustRead reads a block and fails the test if the content is wrong.
func (f *fake) mustRead(block int) {
	f.t.Helper()
	if err := f.read(block); err != nil {
		f.t.Errorf("a right answer is refused: %v", err)
	}
}

func TestHistoryAcceptsWhatMayBe(t *testing.T) {
	f := newFake(t)
	f.mustRead(0) // zeroes
	f.write(0)
	f.mustRead(0)
	_, lost := f.begin(0) // has no answer, and did not happen
	f.mustRead(0)
	copy(f.data[0], lost) // now it has
	f.mustRead(0)
	_, second := f.begin(0)
	_, third := f.begin(0)
	copy(f.data[0], second) // in the order of their beginning, seen or not
	f.mustRead(0)
	copy(f.data[0], third)
	f.mustRead(0)
	f.write(0)
	f.mustRead(0)
	f.mustRead(1) // is not concerned
}

func TestHistoryAcceptsAReadThatBeganBeforeTheAcknowledgement(t *testing.T) {
	f := newFake(t)
	f.write(0)
	old := append([]byte(nil), f.data[0]...)
	since := f.h.Reading(0)
	f.write(0)
	if err := f.h.Check(0, since, old); err != nil {
		t.Errorf("the read overlapped with the write: %v", err)
	}
}

func TestHistoryFindsFaults(t *testing.T) {
	for _, c := range []struct {
		name  string
		fault func(f *fake)
		want  string
	}{
		{"an acknowledged write is lost", func(f *fake) {
			f.write(0)
			s, _ := f.begin(0)
			f.h.Acknowledge(0, s)
		}, "newer data is lost"},
		{"the first write is lost", func(f *fake) {
			s, _ := f.begin(0)
			f.h.Acknowledge(0, s)
		}, "newer data is lost"},
		{"two writes are reordered", func(f *fake) {
			_, first := f.begin(0)
			f.write(0)
			copy(f.data[0], first) // replayed too late
		}, "newer data is lost"},
		{"a write that was seen and not answered disappears", func(f *fake) {
			f.write(0)
			old := append([]byte(nil), f.data[0]...)
			_, next := f.begin(0)
			copy(f.data[0], next)
			f.mustRead(0)
			copy(f.data[0], old)
		}, "newer data is lost"},
		{"an unanswered write reappears after a later one was seen", func(f *fake) {
			_, first := f.begin(0)
			_, second := f.begin(0)
			copy(f.data[0], second)
			f.mustRead(0)
			copy(f.data[0], first)
		}, "newer data is lost"},
		{"a write is torn", func(f *fake) {
			f.write(0)
			_, next := f.begin(0)
			copy(f.data[0], next[:64])
		}, "torn"},
		{"a write stops inside a piece", func(f *fake) {
			f.write(0)
			_, next := f.begin(0)
			copy(f.data[0], next[:48])
		}, "garbage"},
		{"a block holds another block's data", func(f *fake) {
			f.write(0)
			f.write(1)
			copy(f.data[0], f.data[1])
		}, "garbage"},
		{"one bit is wrong", func(f *fake) {
			f.write(0)
			f.data[0][100] ^= 4
		}, "garbage"},
		{"data of another run", func(f *fake) {
			f.write(0)
			NewHistory(4, 128, 8).Begin(0, f.data[0])
		}, "garbage"},
		{"a write that nobody began", func(f *fake) {
			f.write(0)
			f.h.fill(f.data[0], 0, 99)
		}, "never begun"},
		{"a write of another block's stamp", func(f *fake) {
			f.write(0)
			s, _ := f.begin(1)
			f.h.fill(f.data[0], 0, s)
		}, "never begun"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFake(t)
			c.fault(f)
			err := f.read(0)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the checker says %v, want %q", err, c.want)
			}
			if err != nil && c.want != "garbage" && !strings.Contains(err.Error(), "seed 7") {
				t.Errorf("the seed is not told: %v", err)
			}
		})
	}
}
