package rtrs

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
)

func noWake(int) {}

func TestR057_PermitsAreQueueDepthDistinctIDs(t *testing.T) {
	for _, depth := range []int{1, 2, 3, 63, 64, 65, 100, 512, 1000} {
		for _, queues := range []int{1, 2, 3, 5, 64, 200} {
			t.Run(fmt.Sprintf("depth %d, %d queues", depth, queues), func(t *testing.T) {
				p := newPermits(depth, queues, noWake)
				seen := make([]bool, depth)
				for i := range depth {
					id, ok := p.acquire(i % queues)
					if !ok {
						t.Fatalf("only %d of %d ids", i, depth)
					}
					if int(id) >= depth || seen[id] {
						t.Fatalf("id %d twice or out of range", id)
					}
					seen[id] = true
				}
				if id, ok := p.acquire(0); ok {
					t.Fatalf("id %d beyond the queue depth", id)
				}
				if got := p.inUse(); got != depth {
					t.Fatalf("inUse = %d, want %d", got, depth)
				}
				p.release(uint32(depth - 1))
				if id, ok := p.acquire(0); !ok || int(id) != depth-1 {
					t.Fatalf("take after put = %d, %v", id, ok)
				}
			})
		}
	}
}

func TestPermits_QueuesStartInTheirOwnGroups(t *testing.T) {
	p := newPermits(512, 9, noWake)
	for q := range 8 {
		for i := range 64 {
			id, _ := p.acquire(q + 1)
			if want := uint32(q*64 + i); id != want {
				t.Fatalf("queue %d take %d = id %d, want %d", q+1, i, id, want)
			}
		}
	}
}

func TestPermits_StealWhenOwnGroupIsDry(t *testing.T) {
	p := newPermits(128, 3, noWake)
	for range 64 {
		p.acquire(1)
	}
	if id, ok := p.acquire(1); !ok || id != 64 {
		t.Fatalf("take = %d, %v, want the first id of the other queue", id, ok)
	}
}

func TestPermits_StarvedQueueIsWokenByPut(t *testing.T) {
	var woken []int
	p := newPermits(2, 3, func(q int) { woken = append(woken, q) })
	a, _ := p.acquire(0)
	b, _ := p.acquire(0)
	for _, q := range []int{1, 2} {
		if _, ok := p.takeOrMark(q); ok {
			t.Fatal("took an id that is in use")
		}
	}
	p.release(a)
	if fmt.Sprint(woken) != "[1 2]" {
		t.Fatalf("woken queues = %v, want [1 2]", woken)
	}
	p.release(b)
	if len(woken) != 2 {
		t.Fatalf("woken again without a mark: %v", woken)
	}
}

func TestPermits_SparesAreKeptForFences(t *testing.T) {
	for depth, want := range map[int]int{1: 0, 2: 1, 8: 1, 16: 2, 512: 4} {
		p := newPermits(depth, 1, noWake)
		if got := p.keepSpares(); got != want {
			t.Errorf("depth %d keeps %d spares, want %d", depth, got, want)
		}
		if got := p.keepSpares(); got != want {
			t.Errorf("depth %d keeps %d spares when asked again, want %d", depth, got, want)
		}
		for i := range depth - want {
			if _, ok := p.acquire(0); !ok {
				t.Fatalf("depth %d: take %d failed", depth, i)
			}
		}
		if _, ok := p.acquire(0); ok {
			t.Fatalf("depth %d: a spare was given to a request", depth)
		}
	}
}

func TestPermits_SpareIsGivenToOneFence(t *testing.T) {
	p := newPermits(2, 1, noWake)
	p.keepSpares()
	id, ok := p.takeSpare()
	if !ok || id > 1 {
		t.Fatalf("takeSpare = %d, %v", id, ok)
	}
	if _, again := p.takeSpare(); again {
		t.Fatal("the spare was given twice")
	}
	p.putSpare(id)
	if _, ok := p.takeSpare(); !ok {
		t.Fatal("the spare did not come back")
	}
}

// Several owners take and put under contention: no id is held twice, and a
// starved owner is always woken.
func TestR056_PermitIsHeldByOneRequestOnly(t *testing.T) {
	const depth, queues, rounds = 5, 4, 3000
	wakeups := make([]chan struct{}, queues)
	for q := range wakeups {
		wakeups[q] = make(chan struct{}, 1)
	}
	p := newPermits(depth, queues, func(q int) {
		select {
		case wakeups[q] <- struct{}{}:
		default:
		}
	})
	var holder [depth]atomic.Int32
	var wg sync.WaitGroup
	for q := range queues {
		wg.Go(func() {
			for range rounds {
				var held []uint32
				for len(held) < 2 {
					id, ok := p.takeOrMark(q)
					if !ok {
						if len(held) > 0 {
							break
						}
						<-wakeups[q]
						continue
					}
					if !holder[id].CompareAndSwap(0, int32(q+1)) {
						t.Errorf("id %d is held twice", id)
					}
					held = append(held, id)
				}
				for _, id := range held {
					holder[id].Store(0)
					p.release(id)
				}
			}
		})
	}
	wg.Wait()
	if got := p.inUse(); got != 0 {
		t.Errorf("%d ids leaked", got)
	}
}
