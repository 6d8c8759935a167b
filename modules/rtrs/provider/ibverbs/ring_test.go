package ibverbs

import "testing"

func TestRingTakesUpToAnIndex(t *testing.T) {
	r := newRing[int](5)
	r.head, r.tail = indexMask-2, indexMask-2 // indices wrap soon
	var index [8]uint32
	for i := range 5 {
		if r.full() {
			t.Fatalf("full with %d of 5", i)
		}
		index[i] = r.push(i)
	}
	if !r.full() {
		t.Error("not full with 5 of 5")
	}
	if _, ok := r.popTo(r.tail); ok {
		t.Error("took an element that was never put")
	}
	if v, ok := r.popTo(index[2]); !ok || v != 2 {
		t.Errorf("up to the third: %d, %v", v, ok)
	}
	if _, ok := r.popTo(index[1]); ok {
		t.Error("took an element again")
	}
	for want := 3; want < 5; want++ {
		if v, ok := r.pop(); !ok || v != want {
			t.Errorf("got %d, %v, want %d", v, ok, want)
		}
	}
	if _, ok := r.pop(); ok || r.len() != 0 {
		t.Error("something is left")
	}
}
