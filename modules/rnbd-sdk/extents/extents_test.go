package extents

import (
	"bytes"
	"slices"
	"testing"
)

var example = []Extent{{4096, false}, {1 << 40, true}, {512, false}}

func TestPutAndParse(t *testing.T) {
	b := bytes.Repeat([]byte{0xff}, Size+1)
	Put(b, example)
	want := []byte{
		0, 0, 0, 0, 3, 0, 0, 0,
		0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
		0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
		0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
		0, 0,
	}
	if !bytes.HasPrefix(b, want) || b[Size] != 0xff {
		t.Errorf("% x", b[:len(want)])
	}
	got, err := Parse(b, 1<<40+4608)
	if err != nil || !slices.Equal(got, example) {
		t.Errorf("%v, error %v", got, err)
	}
	if got, err := Parse(b, 1<<40+4607); err == nil {
		t.Errorf("a list that is longer than what was asked for: %v", got)
	}
}

func TestParse_Malformed(t *testing.T) {
	for name, change := range map[string]func(b []byte){
		"no extent":            func(b []byte) { b[4] = 0 },
		"too many":             func(b []byte) { b[5] = 1 },
		"empty extent":         func(b []byte) { b[9] = 0 },
		"half a sector":        func(b []byte) { b[9] = 1 },
		"beyond what is asked": func(b []byte) { b[15] = 0x80 },
		"sum overflows":        func(b []byte) { b[15], b[31] = 0x80, 0x80 },
	} {
		b := make([]byte, Size)
		Put(b, example)
		change(b)
		if got, err := Parse(b, 1<<41); err == nil {
			t.Errorf("%s: %v", name, got)
		}
	}
	if _, err := Parse(make([]byte, Size-1), 4096); err == nil {
		t.Error("a short list is taken")
	}
}

// The memory of an earlier list is used again, and nothing of that list is left.
func TestParseInto(t *testing.T) {
	var long []Extent
	for i := range Max {
		long, _ = Add(long, 512, i%2 == 0)
	}
	full, short := make([]byte, Size), make([]byte, Size)
	Put(full, long)
	Put(short, example)
	memory := make([]Extent, 0, Max)
	if n := testing.AllocsPerRun(100, func() {
		for _, v := range []struct {
			b    []byte
			want []Extent
		}{{full, long}, {short, example}} {
			if got, err := ParseInto(memory, v.b, 1<<41); err != nil || !slices.Equal(got, v.want) {
				t.Errorf("%v, error %v", got, err)
			}
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	if got, err := ParseInto(memory[:2], short, 1<<41); err != nil || !slices.Equal(got, example) {
		t.Errorf("%v, error %v", got, err)
	}
	short[9] = 1
	if got, err := ParseInto(memory, short, 1<<41); err == nil || got != nil {
		t.Errorf("%v, error %v of a malformed list", got, err)
	}
}

func TestAdd(t *testing.T) {
	var list []Extent
	for _, n := range []uint64{0, 512, 1024} {
		list, _ = Add(list, n, true)
	}
	list, ok := Add(list, 0, false)
	if !ok || !slices.Equal(list, []Extent{{1536, true}}) {
		t.Errorf("%v, %t", list, ok)
	}
	for i := range Max - 1 {
		if list, ok = Add(list, 512, i%2 == 1); !ok {
			t.Fatalf("no room for range %d", i)
		}
	}
	last := list[Max-1]
	if list, ok = Add(list, 512, last.Hole); !ok || list[Max-1].Len != last.Len+512 {
		t.Error("the last range does not become longer")
	}
	if list, ok = Add(list, 512, !last.Hole); ok || len(list) != Max {
		t.Errorf("%d ranges", len(list))
	}
}

func FuzzParse(f *testing.F) {
	b := make([]byte, Size)
	Put(b, example)
	f.Add(b[:headSize+3*entrySize], uint64(1<<41))
	f.Fuzz(func(t *testing.T, some []byte, size uint64) {
		b := make([]byte, Size)
		copy(b, some)
		list, err := Parse(b, size)
		if err != nil {
			return
		}
		for _, e := range list {
			if e.Len > size {
				t.Fatalf("more than was asked for: %v", list)
			}
			size -= e.Len
		}
		again := make([]byte, Size)
		Put(again, list)
		if got, err := Parse(again, 1<<63); err != nil || !slices.Equal(got, list) {
			t.Fatalf("%v, error %v, want %v", got, err, list)
		}
	})
}
