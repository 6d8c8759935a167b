package main

import (
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// disk is a device of the test that may lie.
type disk struct{ data []byte }

// drive lets a checker do n I/Os on d, one at a time.
func (d *disk) drive(t *testing.T, c *checker, n int, write func(off uint64, b []byte)) error {
	t.Helper()
	buf := make([]byte, c.w.Block)
	memory := func(off int) []byte { return buf[off:min(off+3072, len(buf))] } // in parts
	for range n {
		off, op := c.begin(0, memory)
		if op == blk.Write {
			write(off, buf)
		} else {
			copy(buf, d.data[off:])
		}
		if err := c.finish(0, memory); err != nil {
			return err
		}
	}
	return nil
}

func TestCheckerNoticesWrongData(t *testing.T) {
	for name, c := range map[string]struct {
		write func(d *disk, n int, off uint64, b []byte)
		wrong bool
	}{
		"a disk that works": {func(d *disk, _ int, off uint64, b []byte) { copy(d.data[off:], b) }, false},
		"a write is lost": {func(d *disk, n int, off uint64, b []byte) {
			if n%10 != 9 {
				copy(d.data[off:], b)
			}
		}, true},
		"a write is torn": {func(d *disk, n int, off uint64, b []byte) {
			if n >= 9 {
				b = b[:len(b)-8]
			}
			copy(d.data[off:], b)
		}, true},
		"a write goes elsewhere": {func(d *disk, n int, off uint64, b []byte) {
			if n%10 == 9 {
				off = (off + 4096) % 8192
			}
			copy(d.data[off:], b)
		}, true},
		"a bit flips": {func(d *disk, n int, off uint64, b []byte) {
			copy(d.data[off:], b)
			if n >= 9 {
				d.data[off+1234] ^= 4
			}
		}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := random(true, 1, 1)
			d, writes := &disk{data: make([]byte, 2*w.Block)}, 0
			err := d.drive(t, newChecker(w, 0, uint64(len(d.data))), 2000, func(off uint64, b []byte) {
				writes++
				c.write(d, writes, off, b)
			})
			if wrong := err != nil; wrong != c.wrong {
				t.Errorf("%d writes: %v", writes, err)
			}
			if err != nil && !strings.Contains(err.Error(), "block at") {
				t.Errorf("%v does not say where", err)
			}
		})
	}
}

func TestJobsVerifyBlocksOfTheirOwn(t *testing.T) {
	w := random(true, 16, 4)
	owner := map[uint64]int{}
	for job := range w.Jobs {
		c := newChecker(w, job, 16<<20)
		for b := range c.versions {
			if other, taken := owner[c.offset(b)]; taken {
				t.Fatalf("jobs %d and %d share the block at %d", other, job, c.offset(b))
			}
			owner[c.offset(b)] = job
		}
		if len(c.versions) <= w.Depth {
			t.Errorf("job %d has %d blocks for %d I/Os", job, len(c.versions), w.Depth)
		}
	}
}
