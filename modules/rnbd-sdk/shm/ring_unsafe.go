package shm

import (
	"sync/atomic"
	"unsafe"
)

// Compile-time layout: a negative array length stops the build.
var (
	_ [unsafe.Sizeof(SQE{}) - sqeSize]struct{}
	_ [sqeSize - unsafe.Sizeof(SQE{})]struct{}
	_ [unsafe.Sizeof(CQE{}) - cqeSize]struct{}
	_ [cqeSize - unsafe.Sizeof(CQE{})]struct{}
	_ [unsafe.Offsetof(header{}.sq) - 128]struct{}
	_ [128 - unsafe.Offsetof(header{}.sq)]struct{}
	_ [headerSize - unsafe.Sizeof(header{})]struct{}
)

// words are the shared words of one direction, each on lines of its own.
type words struct {
	Tail atomic.Uint32 // entries produced, modulo 2^32
	_    [124]byte
	Head atomic.Uint32 // entries consumed, modulo 2^32
	_    [124]byte
	Wake atomic.Uint32 // 1: the consumer sleeps, kick its eventfd
	_    [124]byte
}

// view gives a ring's memory its types. It keeps the memory reachable.
type view struct {
	hdr  *header
	sqes []SQE
	cqes []CQE
}

// geometryIn reads the geometry from memory of at least headerSize bytes, once.
func geometryIn(mem []byte) geometry {
	h := (*header)(unsafe.Pointer(&mem[0]))
	return geometry{
		magic: h.Magic, version: h.Version, features: h.Features, entries: h.Entries,
		sqeSize: h.SQESize, cqeSize: h.CQESize, sqOff: h.SQOff, cqOff: h.CQOff,
	}
}

// writeGeometry fills a fresh header.
func writeGeometry(mem []byte, g geometry) {
	h := (*header)(unsafe.Pointer(&mem[0]))
	h.Magic, h.Version, h.Features, h.Entries = g.magic, g.version, g.features, g.entries
	h.SQESize, h.CQESize, h.SQOff, h.CQOff = g.sqeSize, g.cqeSize, g.sqOff, g.cqOff
}

// viewOf gives types to memory with a checked geometry. The number of entries
// is our copy, because the peer may change the header's at any time.
func viewOf(mem []byte, entries int) view {
	_ = mem[ringSize(entries)-1]
	return view{
		hdr:  (*header)(unsafe.Pointer(&mem[0])),
		sqes: unsafe.Slice((*SQE)(unsafe.Pointer(&mem[headerSize])), entries),
		cqes: unsafe.Slice((*CQE)(unsafe.Pointer(&mem[headerSize+entries*sqeSize])), entries),
	}
}

// heapMemory returns zeroed memory aligned for the header's words.
func heapMemory(n int) []byte {
	w := make([]uint64, (n+7)/8)
	return unsafe.Slice((*byte)(unsafe.Pointer(&w[0])), n)
}
