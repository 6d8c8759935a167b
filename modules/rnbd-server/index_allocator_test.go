package server

import (
	"errors"
	"syscall"
	"testing"
)

// A server that runs for long opens more devices than a process has indices.
func TestIndices_ComeBack(t *testing.T) {
	var x indexAllocator
	kept := map[uint32]bool{}
	for range 100 {
		i, err := x.alloc(1)
		if err != nil {
			t.Fatal(err)
		}
		kept[i] = true
	}
	var last uint32
	for n := range 2 * allIndices {
		i, err := x.alloc(1)
		switch {
		case err != nil:
			t.Fatalf("open %d: %v", n, err)
		case kept[i]:
			t.Fatalf("open %d: index %d is in use", n, i)
		case i >= fewIndices:
			t.Fatalf("open %d: index %d with %d devices", n, i, len(kept))
		case n > 0 && i == last:
			t.Fatalf("open %d: index %d was just given back", n, i)
		}
		last = i
		x.free(i)
	}
}

func TestIndices_AllInUse(t *testing.T) {
	var x indexAllocator
	seen := map[uint32]bool{}
	for range allIndices {
		i, err := x.alloc(1)
		if err != nil || i >= allIndices || seen[i] {
			t.Fatalf("index %d after %d, %v", i, len(seen), err)
		}
		seen[i] = true
	}
	if _, err := x.alloc(1); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("one too many: %v", err)
	}
	x.free(77)
	if i, err := x.alloc(1); err != nil || i != 77 {
		t.Errorf("index %d, %v, want the only one left", i, err)
	}
}

func TestIndices_SpoiledUntilTheProcessEnds(t *testing.T) {
	var x indexAllocator
	i, err := x.alloc(1)
	if err != nil {
		t.Fatal(err)
	}
	x.free(i)
	x.reserveUntil(i, 1)
	for _, c := range []struct {
		generation uint32
		want       bool
	}{{1, false}, {2, true}} {
		found := false
		for range 2 * fewIndices {
			k, err := x.alloc(c.generation)
			if err != nil {
				t.Fatal(err)
			}
			found = found || k == i
			x.free(k)
			if k == i {
				break
			}
		}
		if found != c.want {
			t.Errorf("generation %d: used %t", c.generation, found)
		}
	}
}
