package tally

import "testing"

// A reader sees the counts of a writer rise, two of them in their order, and in
// the end all.
func TestCount(t *testing.T) {
	const last = 1 << 20
	var first, second Count
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range last {
			first.Add(2)
			second.Add(2)
		}
	}()
	for seen, running := uint64(0), true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		b := second.Load() // first: the other one is never behind it
		a := first.Load()
		if a < b || b < seen || a%2 != 0 {
			t.Fatalf("%d, then %d and %d", seen, a, b)
		}
		seen = b
	}
	if a, b := first.Load(), second.Load(); a != 2*last || b != 2*last {
		t.Errorf("%d and %d, want %d", a, b, 2*last)
	}
}

func BenchmarkAdd(b *testing.B) {
	var c Count
	for b.Loop() {
		c.Add(1)
	}
}
