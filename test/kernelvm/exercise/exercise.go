// Package exercise uses a block device in every way that RNBD has, and checks
// the data against a model.
package exercise

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"sync"
	"time"
)

// Disk is the disk under test. Offsets and lengths are bytes, multiples of
// 4096.
type Disk interface {
	io.ReaderAt
	io.WriterAt
	Size() int64
	WriteFUA(p []byte, off int64) error
	Flush() error
	Discard(off, n int64) error
	WriteZeroes(off, n int64) error
}

const block = 4096

// model is a disk and its expected contents.
type model struct {
	d    Disk
	want []byte
	rnd  *rand.Rand
}

// All does everything once, then random requests of several at a time, and
// returns the sum of the contents (see Sum). The first 16 MiB are written
// at least.
func All(d Disk, seed uint64) (sum string, err error) {
	m := &model{d: d, want: make([]byte, d.Size()), rnd: rand.New(rand.NewPCG(seed, 1))}
	if d.Size() < 16<<20 {
		return "", fmt.Errorf("device has %d bytes, 16 MiB are needed", d.Size())
	}
	if err := m.read(0, m.want); err != nil {
		return "", fmt.Errorf("read what is there: %w", err)
	}
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"requests of 4 KiB to 1 MiB", m.sizes},
		{"flush", d.Flush},
		{"forced unit access", m.fua},
		{"write zeroes", m.zeroes},
		{"discard", m.discard},
		{"random requests", func() error { return m.random(8, 60, seed) }},
		{"flush at the end", d.Flush},
	} {
		if err := step.do(); err != nil {
			return "", fmt.Errorf("%s: %w", step.name, err)
		}
	}
	if err := m.verify(0, d.Size()); err != nil {
		return "", fmt.Errorf("all of it at the end: %w", err)
	}
	return Sum(bytes.NewReader(m.want))
}

// Until sends random requests until ctx ends and verifies its reads, and the
// whole disk at the end. longest is the time that the slowest request took.
func Until(ctx context.Context, d Disk, seed uint64) (requests int, longest time.Duration, err error) {
	m := &model{d: d, want: make([]byte, d.Size()), rnd: rand.New(rand.NewPCG(seed, 1))}
	if err := m.read(0, m.want); err != nil {
		return 0, 0, fmt.Errorf("read what is there: %w", err)
	}
	for ; ctx.Err() == nil; seed++ {
		t := &timed{Disk: d}
		m.d = t
		err := m.random(4, 25, seed)
		requests, longest = requests+t.n, max(longest, t.longest)
		if err != nil {
			return requests, longest, err
		}
	}
	m.d = d
	return requests, longest, m.verify(0, d.Size())
}

// Sum is the CRC-32C of all bytes of r. It is cheap in an emulated guest too.
func Sum(r io.Reader) (string, error) {
	h := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	_, err := io.CopyBuffer(h, struct{ io.Reader }{r}, make([]byte, 1<<20))
	return fmt.Sprintf("%08x", h.Sum32()), err
}

// read reads len(p) bytes in pieces of 1 MiB.
func (m *model) read(off int64, p []byte) error {
	for len(p) > 0 {
		n := min(len(p), 1<<20)
		if _, err := m.d.ReadAt(p[:n], off); err != nil {
			return fmt.Errorf("read %d bytes at %d: %w", n, off, err)
		}
		p, off = p[n:], off+int64(n)
	}
	return nil
}

func (m *model) verify(off, n int64) error {
	got := make([]byte, n)
	if err := m.read(off, got); err != nil {
		return err
	}
	return compare(off, got, m.want[off:off+n])
}

func compare(off int64, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	wrong, first := 0, -1
	for i := 0; i < len(got); i += block {
		if !bytes.Equal(got[i:i+block], want[i:i+block]) {
			wrong++
			if first < 0 {
				first = i
			}
		}
	}
	zero := bytes.Equal(got[first:first+block], make([]byte, block))
	return fmt.Errorf("wrong data in %d of %d blocks, the first at byte %d (all zero: %t)", wrong, len(got)/block, off+int64(first), zero)
}

// fill puts new data into the model.
func fill(p []byte, rnd *rand.Rand) {
	for i := 0; i+8 <= len(p); i += 8 {
		binary.LittleEndian.PutUint64(p[i:], rnd.Uint64())
	}
}

func (m *model) write(off, n int64) error {
	p := m.want[off : off+n]
	fill(p, m.rnd)
	if _, err := m.d.WriteAt(p, off); err != nil {
		return fmt.Errorf("write %d bytes at %d: %w", n, off, err)
	}
	return nil
}

// sizes writes and reads requests of all sizes, also those around the largest
// request of a default session, 126976 bytes.
func (m *model) sizes() error {
	off := int64(0)
	for _, n := range []int64{4 << 10, 8 << 10, 16 << 10, 60 << 10, 64 << 10, 120 << 10, 124 << 10, 128 << 10, 256 << 10, 500 << 10, 1 << 20} {
		if err := m.write(off, n); err != nil {
			return err
		}
		if err := m.verify(off, n); err != nil {
			return err
		}
		off += n + block
	}
	return m.verify(0, off)
}

func (m *model) fua() error {
	for _, n := range []int64{4 << 10, 128 << 10} {
		off := 5 << 20 // behind the place of sizes
		p := m.want[off : int64(off)+n]
		fill(p, m.rnd)
		if err := m.d.WriteFUA(p, int64(off)); err != nil {
			return err
		}
		if err := m.verify(int64(off), n); err != nil {
			return err
		}
	}
	return nil
}

// zeroes cuts a hole of zeroes into data. The data around it stay.
func (m *model) zeroes() error {
	const off, n = 6 << 20, 512 << 10
	if err := m.write(off, n); err != nil {
		return err
	}
	if err := m.d.WriteZeroes(off+128<<10, 256<<10); err != nil {
		return err
	}
	clear(m.want[off+128<<10 : off+384<<10])
	return m.verify(off, n)
}

// discard discards between data. Those stay; the discarded blocks may read as
// anything until they are written again.
func (m *model) discard() error {
	const off, n = 8 << 20, 1 << 20
	if err := m.write(off, n); err != nil {
		return err
	}
	if err := m.d.Discard(off+256<<10, 512<<10); err != nil {
		return err
	}
	for _, part := range []int64{off, off + 768<<10} {
		if err := m.verify(part, 256<<10); err != nil {
			return err
		}
	}
	if err := m.write(off+256<<10, 512<<10); err != nil {
		return err
	}
	return m.verify(off, n)
}

// random lets workers write and verify at random, each in its own part.
func (m *model) random(workers, requests int, seed uint64) error {
	part := m.d.Size() / int64(workers) / block * block
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			mine := &model{d: m.d, want: m.want, rnd: rand.New(rand.NewPCG(seed, uint64(w+2)))}
			for range requests {
				n := block * (1 + mine.rnd.Int64N(1<<mine.rnd.IntN(7)))
				off := int64(w)*part + block*mine.rnd.Int64N((part-n)/block)
				err := error(nil)
				if mine.rnd.IntN(2) == 0 {
					err = mine.write(off, n)
				} else {
					err = mine.verify(off, n)
				}
				if err != nil {
					errs[w] = fmt.Errorf("worker %d: %w", w, err)
					return
				}
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// timed counts requests and remembers the slowest.
type timed struct {
	Disk
	mu      sync.Mutex
	n       int
	longest time.Duration
}

func (t *timed) note(begin time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n++
	t.longest = max(t.longest, time.Since(begin))
}

func (t *timed) ReadAt(p []byte, off int64) (int, error) {
	defer t.note(time.Now())
	return t.Disk.ReadAt(p, off)
}

func (t *timed) WriteAt(p []byte, off int64) (int, error) {
	defer t.note(time.Now())
	return t.Disk.WriteAt(p, off)
}
