package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func pattern(n int, seed uint64) []byte {
	rnd := rand.New(rand.NewPCG(seed, 2))
	b := make([]byte, 0, n+8)
	for len(b) < n {
		b = binary.LittleEndian.AppendUint64(b, rnd.Uint64())
	}
	return b[:n]
}

// bothReplies runs a test with simple and with structured replies.
func bothReplies(t *testing.T, f func(t *testing.T, structured bool)) {
	for _, structured := range []bool{false, true} {
		t.Run(fmt.Sprintf("structured=%v", structured), func(t *testing.T) { f(t, structured) })
	}
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	bothReplies(t, func(t *testing.T, structured bool) {
		r := newRig(t, rigConfig{})
		c := r.connect(structured)
		for _, v := range []struct {
			name   string
			off, n int
		}{
			{"one block", 0, 512},
			{"4 KiB", 8192, 4096},
			{"a slot", 64 << 10, 64 << 10},
			{"several slots", 128 << 10, 1 << 20},
			{"several slots and a block", 512, 1<<20 + 512},
			{"less than a block", 700, 100},
			{"across two blocks", 1000, 100},
			{"unaligned, several slots", 4097, 300001},
			{"one byte at the end", 4<<20 - 1, 1},
			{"everything", 0, 4 << 20},
		} {
			t.Run(v.name, func(t *testing.T) {
				want := pattern(v.n, uint64(v.off+1))
				if code := c.write(uint64(v.off), want); code != 0 {
					t.Fatalf("write: error %d", code)
				}
				got := make([]byte, v.n)
				if code := c.read(uint64(v.off), got); code != 0 {
					t.Fatalf("read: error %d", code)
				}
				if !bytes.Equal(got, want) || !bytes.Equal(r.disks[0].at(uint64(v.off), v.n), want) {
					t.Error("data differ")
				}
			})
		}
		eventually(t, "slots are back", func() bool { return r.free(0) })
	})
}

// TestRandomModel runs several connections at depth against a model: each
// connection owns interleaved pieces of the device that share blocks with those
// of others.
func TestRandomModel(t *testing.T) {
	for _, v := range []struct {
		name             string
		queues, slots    int
		slotSize, pieces int
		align            int
	}{
		{"aligned, many slots", 2, 64, 64 << 10, 97, 512},
		{"aligned, few slots", 1, 5, 4096, 61, 512},
		{"unaligned, many slots", 2, 64, 64 << 10, 1300, 1},
		{"unaligned, few slots", 2, 8, 4096, 700, 1},
		{"unaligned, small pieces share blocks", 2, 32, 4096, 61, 1},
		{"one slot", 1, 1, 2048, 700, 1},
	} {
		t.Run(v.name, func(t *testing.T) {
			r := newRig(t, rigConfig{queues: v.queues, slots: v.slots, slotSize: v.slotSize, seed: 5, limits: testLimits(256 << 10)})
			var wg sync.WaitGroup
			for i := range 4 {
				c := r.connect(i%2 == 0)
				for depth := range 4 {
					w := &walker{c: c, rnd: rand.New(rand.NewPCG(uint64(i), uint64(depth))),
						who: i*4 + depth, piece: v.pieces * v.align, size: 256 << 10}
					wg.Add(1)
					go func() { defer wg.Done(); w.run(t, 60) }()
				}
			}
			wg.Wait()
			eventually(t, "slots are back", func() bool { return r.free(0) })
		})
	}
}

// walker owns every 16th piece of the device.
type walker struct {
	c           *client
	rnd         *rand.Rand
	who         int
	piece, size int
}

func (w *walker) run(t *testing.T, steps int) {
	model := map[int][]byte{}
	for range steps {
		row := w.rnd.IntN(max(1, w.size/(16*w.piece)))
		at := (row*16 + w.who) * w.piece
		if at+w.piece > w.size {
			continue
		}
		m := model[at]
		if m == nil {
			m = make([]byte, w.piece)
			model[at] = m
		}
		code := uint32(0)
		switch w.rnd.IntN(6) {
		case 0, 1, 2:
			copy(m, pattern(w.piece, w.rnd.Uint64()))
			code = w.c.write(uint64(at), m)
		case 3:
			clear(m)
			code = w.c.do(nbdwire.CmdWriteZeroes, nbdwire.CmdFlagFUA, uint64(at), w.piece, nil)
		default:
			got := make([]byte, w.piece)
			code = w.c.read(uint64(at), got)
			if !bytes.Equal(got, m) {
				t.Errorf("walker %d reads something else at %d", w.who, at)
				return
			}
		}
		if code != 0 {
			t.Errorf("walker %d: error %d", w.who, code)
			return
		}
	}
}

func TestPartialWritesOfOneBlockAllSurvive(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2, seed: 9, slots: 64, slotSize: 4096})
	var wg sync.WaitGroup
	for i := range 8 {
		c := r.connect(false)
		wg.Add(1)
		go func() {
			defer wg.Done()
			for round := range 40 {
				p := bytes.Repeat([]byte{byte(round + 1)}, 64)
				if code := c.write(uint64(i*64), p); code != 0 {
					t.Errorf("error %d", code)
				}
				got := make([]byte, 64)
				if c.read(uint64(i*64), got); !bytes.Equal(got, p) {
					t.Errorf("bytes of connection %d are lost in round %d", i, round)
					return
				}
			}
		}()
	}
	wg.Wait()
	eventually(t, "claims are gone", func() bool { return r.free(0) })
}

// A full write of a block and a write of a part of it: whatever the order, the
// rest of the block is the full write's.
func TestPartialWriteDoesNotUndoWholeWrite(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2, seed: 3, slots: 64, slotSize: 4096})
	whole, part := r.connect(false), r.connect(false)
	for round := range 200 {
		full := bytes.Repeat([]byte{byte(round)}, 1024)
		p := whole.start(nbdwire.CmdWrite, 0, 0, len(full), full)
		q := part.start(nbdwire.CmdWrite, 0, 500, 24, bytes.Repeat([]byte{0xee}, 24))
		for _, call := range []*call{p, q} {
			if code, err := call.wait(); code != 0 || err != nil {
				t.Fatal(code, err)
			}
		}
		got := make([]byte, 1024)
		whole.read(0, got)
		if !bytes.Equal(got[:500], full[:500]) || !bytes.Equal(got[524:], full[524:]) {
			t.Fatalf("round %d: an acknowledged write is undone", round)
		}
	}
}

func TestLargestRequests(t *testing.T) {
	bothReplies(t, func(t *testing.T, structured bool) {
		for _, slots := range []int{5, 600} {
			if structured == (slots == 5) {
				continue // a simple reply from few slots is a stream, from many it gathers
			}
			r := newRig(t, rigConfig{slots: slots, limits: testLimits(36 << 20)})
			c := r.connect(structured)
			want := pattern(nbdwire.MaxPayload, 1)
			if code := c.write(1<<20, want); code != 0 {
				t.Fatal(code)
			}
			got := make([]byte, nbdwire.MaxPayload)
			if code := c.read(1<<20, got); code != 0 {
				t.Fatal(code)
			}
			if !bytes.Equal(got, want) {
				t.Fatal("data differ")
			}
			if code := c.do(nbdwire.CmdRead, 0, 0, nbdwire.MaxPayload+1, nil); code != nbdEINVAL {
				t.Errorf("read of more than 32 MiB: error %d", code)
			}
			if code := c.write(0, make([]byte, nbdwire.MaxPayload+1)); code != nbdEINVAL {
				t.Errorf("write of more than 32 MiB: error %d", code)
			}
			if code := c.read(1<<20, got[:512]); code != 0 || !bytes.Equal(got[:512], want[:512]) {
				t.Error("the connection does not survive")
			}
		}
	})
}

func TestConcurrentLargeReadsDoNotDeadlock(t *testing.T) {
	bothReplies(t, func(t *testing.T, structured bool) {
		r := newRig(t, rigConfig{slots: 16, slotSize: 4096, seed: 4})
		r.disks[0].with(func() { copy(r.disks[0].mem, pattern(4<<20, 7)) })
		var wg sync.WaitGroup
		for i := range 6 {
			c := r.connect(structured)
			wg.Add(1)
			go func() {
				defer wg.Done()
				for j := range 20 {
					got := make([]byte, 10*4096+i*4096)
					off := uint64(j*8192 + i)
					if code := c.read(off, got); code != 0 || !bytes.Equal(got, r.disks[0].at(off, len(got))) {
						t.Errorf("error %d, or data differ", code)
					}
				}
			}()
		}
		wg.Wait()
		eventually(t, "slots are back", func() bool { return r.free(0) })
	})
}

func TestRefusals(t *testing.T) {
	l := testLimits(1 << 20)
	ro := l
	ro.ReadOnly = true
	plain := l
	plain.MaxDiscard, plain.MaxWriteZeroes = 0, 0
	for _, v := range []struct {
		name       string
		limits     blk.Limits
		cmd, flags uint16
		off        uint64
		n          int
		want       uint32
	}{
		{"read beyond the end", l, nbdwire.CmdRead, 0, 1 << 20, 1, nbdEINVAL},
		{"read across the end", l, nbdwire.CmdRead, 0, 1<<20 - 1, 2, nbdEINVAL},
		{"read at an offset that wraps", l, nbdwire.CmdRead, 0, 1<<64 - 1, 2, nbdEINVAL},
		{"write beyond the end", l, nbdwire.CmdWrite, 0, 1<<20 - 1, 512, nbdENOSPC},
		{"write zeroes beyond the end", l, nbdwire.CmdWriteZeroes, 0, 1 << 20, 512, nbdENOSPC},
		{"trim beyond the end", l, nbdwire.CmdTrim, 0, 1 << 20, 512, nbdEINVAL},
		{"write to a read-only device", ro, nbdwire.CmdWrite, 0, 0, 512, nbdEPERM},
		{"trim of a read-only device", ro, nbdwire.CmdTrim, 0, 0, 512, nbdEPERM},
		{"trim where there is none", plain, nbdwire.CmdTrim, 0, 0, 512, nbdENOTSUP},
		{"write zeroes where there is none", plain, nbdwire.CmdWriteZeroes, 0, 0, 512, nbdENOTSUP},
		{"unknown command", l, 99, 0, 0, 512, nbdEINVAL},
		{"cache", l, 5, 0, 0, 512, nbdEINVAL},
		{"unknown flag on a read", l, nbdwire.CmdRead, 1 << 2, 0, 512, nbdEINVAL},
		{"unknown flag on a write", l, nbdwire.CmdWrite, 1 << 7, 0, 512, nbdEINVAL},
		{"fast zero", l, nbdwire.CmdWriteZeroes, 1 << 4, 0, 512, nbdEINVAL},
		{"empty read", l, nbdwire.CmdRead, 0, 0, 0, 0},
		{"empty write", l, nbdwire.CmdWrite, nbdwire.CmdFlagFUA, 0, 0, 0},
		{"empty trim", l, nbdwire.CmdTrim, 0, 0, 0, 0},
		{"trim of less than a block", l, nbdwire.CmdTrim, 0, 1, 510, 0},
		{"read with FUA", l, nbdwire.CmdRead, nbdwire.CmdFlagFUA, 0, 512, 0},
	} {
		t.Run(v.name, func(t *testing.T) {
			bothReplies(t, func(t *testing.T, structured bool) {
				r := newRig(t, rigConfig{limits: v.limits})
				r.disks[0].with(func() { r.disks[0].keep = true })
				c := r.connect(structured)
				if code := c.do(v.cmd, v.flags, v.off, v.n, make([]byte, v.n)); code != v.want {
					t.Errorf("error %d, want %d", code, v.want)
				}
				if n := len(r.disks[0].requests()); n > 0 && (v.want != 0 || v.n == 0) {
					t.Errorf("%d requests reached the device", n)
				}
				if code := c.read(0, make([]byte, 512)); code != 0 {
					t.Errorf("next read: error %d", code)
				}
			})
		})
	}
}

func TestFirstErrorWins(t *testing.T) {
	bothReplies(t, func(t *testing.T, structured bool) {
		r := newRig(t, rigConfig{slots: 8, slotSize: 4096, seed: 2})
		d := r.disks[0]
		d.with(func() {
			d.fails = func(e *shm.SQE) blk.Errno {
				if e.Offset == 8192 {
					return blk.ENOSPC
				}
				return blk.OK
			}
		})
		c := r.connect(structured)
		if code := c.write(0, make([]byte, 64<<10)); code != nbdENOSPC {
			t.Errorf("write: error %d", code)
		}
		if code := c.read(0, make([]byte, 16<<10)); code != nbdENOSPC {
			t.Errorf("read: error %d", code)
		}
		if code := c.write(8192+100, make([]byte, 10)); code != nbdENOSPC {
			t.Errorf("read-modify-write: error %d", code)
		}
		if code := c.do(nbdwire.CmdTrim, 0, 8192, 4096, nil); code != nbdENOSPC {
			t.Errorf("trim: error %d", code)
		}
		got := make([]byte, 4096)
		if code := c.read(0, got); code != 0 {
			t.Errorf("next read: error %d", code)
		}
		eventually(t, "slots are back", func() bool { return r.free(0) })
	})
}

// A read that does not fit the slots has told success when its later part
// fails: simple replies leave nothing but to close, structured ones tell.
func TestLateErrorOfStreamedRead(t *testing.T) {
	bothReplies(t, func(t *testing.T, structured bool) {
		r := newRig(t, rigConfig{slots: 4, slotSize: 4096})
		d := r.disks[0]
		d.with(func() {
			d.fails = func(e *shm.SQE) blk.Errno {
				if e.Offset >= 64<<10 {
					return blk.EIO
				}
				return blk.OK
			}
		})
		c := r.connect(structured)
		code, err := c.start(nbdwire.CmdRead, 0, 0, 128<<10, make([]byte, 128<<10)).wait()
		if structured && (code != nbdEIO || err != nil) {
			t.Errorf("error %d, %v", code, err)
		}
		if !structured && err == nil {
			t.Errorf("reply %d of a read that failed half-way", code)
		}
		eventually(t, "slots are back", func() bool { return r.free(0) })
	})
}
