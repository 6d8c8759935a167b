package filemodel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
)

// Config names the files to work on.
type Config struct {
	Dir     string // an existing folder, of this tester alone
	Seed    uint64
	Files   int // default 4
	MaxSize int // of a file, default 1 MiB
}

// Tester has a model of each file.
type Tester struct {
	cfg   Config
	rng   *rand.Rand
	files []*file
	steps int
}

// New makes the files, empty.
func New(c Config) (*Tester, error) {
	if c.Files == 0 {
		c.Files = 4
	}
	if c.MaxSize == 0 {
		c.MaxSize = 1 << 20
	}
	t := &Tester{cfg: c, rng: rand.New(rand.NewPCG(c.Seed, 0))}
	for i := range c.Files {
		f := &file{path: filepath.Join(c.Dir, fmt.Sprintf("file%d", i))}
		if err := os.WriteFile(f.path, nil, 0o644); err != nil {
			return nil, errors.Join(err, t.Close())
		}
		if err := f.open(); err != nil {
			return nil, errors.Join(err, t.Close())
		}
		t.files = append(t.files, f)
	}
	return t, nil
}

// Steps is how many steps were done.
func (t *Tester) Steps() int { return t.steps }

// Run does steps until stop says so. stop is called before each.
func (t *Tester) Run(stop func() bool) error {
	for !stop() {
		if err := t.step(); err != nil {
			return err
		}
	}
	return nil
}

// step does one thing to one file.
func (t *Tester) step() error {
	t.steps++
	f := t.files[t.rng.IntN(len(t.files))]
	op := ops[pick[t.rng.IntN(len(pick))]]
	off, n := t.extent()
	f.note("%d %s %d+%d", t.steps, op.name, off, n)
	if err := op.do(f, off, n, t.steps); err != nil {
		return t.explain(f, err)
	}
	return nil
}

// extent chooses a place in a file: mostly small, of any alignment or of
// blocks, sometimes large.
func (t *Tester) extent() (off, n int) {
	limit := []int{512, 5000, 64 << 10, t.cfg.MaxSize}[t.rng.IntN(4)]
	off = t.rng.IntN(t.cfg.MaxSize)
	n = 1 + t.rng.IntN(min(limit, t.cfg.MaxSize-off))
	if t.rng.IntN(3) == 0 {
		off &^= 4095
		n = min((n+4095)&^4095, t.cfg.MaxSize-off)
	}
	return off, n
}

// Check compares the files as a whole, reopened if they were closed.
func (t *Tester) Check() error {
	for _, f := range t.files {
		if err := f.compareAll(); err != nil {
			return t.explain(f, err)
		}
	}
	return nil
}

// Close closes the files, so that the file system can be unmounted. Check and
// Run open them again.
func (t *Tester) Close() error {
	var errs []error
	for _, f := range t.files {
		errs = append(errs, f.close())
	}
	return errors.Join(errs...)
}

func (t *Tester) explain(f *file, err error) error {
	return fmt.Errorf("seed %d, step %d, %s: %w\nwhat was done to it:\n%s",
		t.cfg.Seed, t.steps, f.path, err, strings.Join(f.trace, "\n"))
}

// compare tells where got, read from off on, differs from want.
func compare(got, want []byte, off int) error {
	if bytes.Equal(got, want) {
		return nil
	}
	for i := range want {
		if got[i] == want[i] {
			continue
		}
		at := off + i
		return fmt.Errorf("byte %d is %#x and must be %#x: it holds %s, and must hold %s",
			at, got[i], want[i], origin(got, off, at), origin(want, off, at))
	}
	return nil
}

// fill writes the data of step for the place off.
func fill(buf []byte, off, step int) {
	for i := 0; i < len(buf); {
		at := off + i
		if at%8 == 0 && len(buf)-i >= 8 {
			binary.LittleEndian.PutUint64(buf[i:], word(step, at))
			i += 8
			continue
		}
		buf[i] = byte(word(step, at) >> (8 * (at % 8)))
		i++
	}
}

// word returns the eight bytes around the place at.
func word(step, at int) uint64 { return uint64(step)<<24 | uint64(at/8)&0xffffff }

// origin reads the word around at out of buf, which begins at off.
func origin(buf []byte, off, at int) string {
	from := at - at%8 - off
	if from < 0 || from+8 > len(buf) {
		return "a part of a word"
	}
	w := binary.LittleEndian.Uint64(buf[from:])
	switch step := int(w >> 24); {
	case w == 0:
		return "zeroes"
	case word(step, at) == w:
		return fmt.Sprintf("what step %d wrote there", step)
	default:
		return fmt.Sprintf("%#x, which was never written there", w)
	}
}
