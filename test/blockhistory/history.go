package blockhistory

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// History is the record of requests to the blocks of a disk that was full of
// zeroes. Its methods may be called from any goroutine.
type History struct {
	seed  uint64
	size  int // bytes of a block, a multiple of grain
	start time.Time

	mu     sync.Mutex
	last   uint64
	blocks map[int64]map[uint64]*written // by number and stamp of the write
	judged int64
}

const (
	grain = 32 // bytes that identify the write they belong to
	never = math.MaxInt64
)

// written is a write of a block, and the reads that returned it. Times are ns
// since the start.
type written struct {
	begin, ack int64  // of the write; never: it was not acknowledged
	late       int64  // last begin of the reads that began after ack; 0: none
	during     []span // reads that began before
}

// span is the time of a request.
type span struct{ begin, end int64 }

// New is the history of a disk of blocks of size bytes. Contents depend on seed,
// so that data of another history are not taken for ours.
func New(size int, seed uint64) *History {
	if size < grain || size%grain != 0 {
		panic(fmt.Sprintf("blockhistory: blocks of %d bytes", size))
	}
	return &History{seed: seed, size: size, start: time.Now(), blocks: map[int64]map[uint64]*written{}}
}

// BlockSize returns the bytes of a block.
func (h *History) BlockSize() int { return h.size }

// Judged is the number of blocks that were written with an answer, or read.
func (h *History) Judged() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.judged
}

func (h *History) now() int64 { return int64(time.Since(h.start)) }

// writes returns those of a block, with its contents in the beginning. mu is
// held.
func (h *History) writes(block int64) map[uint64]*written {
	w := h.blocks[block]
	if w == nil {
		w = map[uint64]*written{0: {begin: -2, ack: -1}}
		h.blocks[block] = w
	}
	return w
}

// Write is a write under way.
type Write struct {
	h     *History
	block int64
	n     int
	stamp uint64
}

// BeginWrite begins a write of len(buf) bytes at the given block, and fills buf.
func (h *History) BeginWrite(block int64, buf []byte) Write {
	n := len(buf) / h.size
	h.mu.Lock()
	h.last++
	w := Write{h, block, n, h.last}
	now := h.now()
	for b := block; b < block+int64(n); b++ {
		h.writes(b)[w.stamp] = &written{begin: now, ack: never}
	}
	h.mu.Unlock()
	for i := range n {
		h.fill(buf[i*h.size:][:h.size], block+int64(i), w.stamp)
	}
	return w
}

// Done is called when the write was acknowledged.
func (w Write) Done() {
	h := w.h
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.now()
	for b := w.block; b < w.block+int64(w.n); b++ {
		h.blocks[b][w.stamp].ack = now
	}
	h.judged += int64(w.n)
}

// Read is a read under way.
type Read struct {
	h     *History
	block int64
	n     int
	begin int64
}

// BeginRead begins a read of n blocks.
func (h *History) BeginRead(block int64, n int) Read { return Read{h, block, n, h.now()} }

// Done notes the data that the read returned. It returns an error if no write
// has written them there.
func (r Read) Done(buf []byte) error {
	h := r.h
	stamps := make([]uint64, r.n)
	torn := make([]bool, r.n)
	for i := range r.n {
		var err error
		content := buf[i*h.size:][:h.size]
		if stamps[i], torn[i], err = h.identify(content, r.block+int64(i)); err != nil {
			return err
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	end := h.now()
	h.judged += int64(r.n)
	for i, stamp := range stamps {
		if err := h.note(r, r.block+int64(i), stamp, torn[i], end); err != nil {
			return err
		}
	}
	return nil
}

// note takes the answer for one block. mu is held.
func (h *History) note(r Read, block int64, stamp uint64, torn bool, end int64) error {
	w := h.writes(block)[stamp]
	switch {
	case w == nil:
		return fmt.Errorf("block %d holds write %d, which was never begun (seed %d)", block, stamp, h.seed)
	case torn && !h.writing(block, r.begin):
		return fmt.Errorf("block %d is torn, begins with write %d, and nothing was written meanwhile (seed %d)", block, stamp, h.seed)
	case torn: // by a write that ran at the same time
		return nil
	}
	if r.begin > w.ack {
		w.late = max(w.late, r.begin)
	} else {
		w.during = append(w.during, span{r.begin, end})
	}
	return nil
}

// writing reports whether a write of the block may have run since then. mu is
// held.
func (h *History) writing(block, since int64) bool {
	for stamp, w := range h.blocks[block] {
		if stamp != 0 && w.ack >= since {
			return true
		}
	}
	return false
}

// identify returns the write that content is of, by its first bytes, and whether
// other bytes are of another write.
func (h *History) identify(content []byte, block int64) (stamp uint64, torn bool, err error) {
	want := make([]byte, h.size)
	first, known := uint64(0), ^uint64(0)
	for at := 0; at < h.size; at += grain {
		stamp := binary.LittleEndian.Uint64(content[at+8:])
		if stamp != known {
			h.fill(want, block, stamp)
			known = stamp
		}
		if string(content[at:at+grain]) != string(want[at:at+grain]) {
			return 0, false, fmt.Errorf("block %d holds garbage at byte %d: % x (seed %d)", block, at, content[at:at+grain], h.seed)
		}
		if at == 0 {
			first = stamp
		}
		torn = torn || stamp != first
	}
	return first, torn, nil
}

// fill writes the content of a block that a write leaves: every grain tells
// block, place and write, and has noise of these.
func (h *History) fill(buf []byte, block int64, stamp uint64) {
	if stamp == 0 {
		clear(buf)
		return
	}
	noise := rand.NewPCG(h.seed^uint64(block), stamp)
	for at := 0; at < len(buf); at += grain {
		binary.LittleEndian.PutUint64(buf[at:], uint64(block)<<16|uint64(at))
		binary.LittleEndian.PutUint64(buf[at+8:], stamp)
		binary.LittleEndian.PutUint64(buf[at+16:], noise.Uint64())
		binary.LittleEndian.PutUint64(buf[at+24:], noise.Uint64())
	}
}
