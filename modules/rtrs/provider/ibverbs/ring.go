package ibverbs

// indexedQueue is a queue of fixed capacity. Its elements have indices that count up
// in 31 bits.
type indexedQueue[T any] struct {
	items      []T // a power of two
	capacity   uint32
	head, tail uint32 // indices of the next pop and push
}

const indexMask = 1<<31 - 1

func newRing[T any](capacity int) indexedQueue[T] {
	size := 1
	for size < capacity {
		size *= 2
	}
	return indexedQueue[T]{items: make([]T, size), capacity: uint32(capacity)}
}

func (r *indexedQueue[T]) len() uint32 { return (r.tail - r.head) & indexMask }

func (r *indexedQueue[T]) full() bool { return r.len() >= r.capacity }

// push appends v and returns its index. There must be room.
func (r *indexedQueue[T]) push(v T) (index uint32) {
	index = r.tail
	r.items[int(index)&(len(r.items)-1)] = v
	r.tail = (r.tail + 1) & indexMask
	return index
}

// pop takes the oldest element.
func (r *indexedQueue[T]) pop() (v T, ok bool) {
	if r.head == r.tail {
		return v, false
	}
	v = r.items[int(r.head)&(len(r.items)-1)]
	r.head = (r.head + 1) & indexMask
	return v, true
}

// popTo takes the elements up to index and returns that one. An index that is
// not in the ring changes nothing.
func (r *indexedQueue[T]) popTo(index uint32) (v T, ok bool) {
	if (index-r.head)&indexMask >= r.len() {
		return v, false
	}
	v = r.items[int(index)&(len(r.items)-1)]
	r.head = (index + 1) & indexMask
	return v, true
}
