package exercise

import (
	"context"
	"strings"
	"sync"
	"testing"
)

// memory is a disk that can be made to lie.
type memory struct {
	mu   sync.Mutex
	b    []byte
	lose func(off int64, n int) bool // of a write
}

func (m *memory) Size() int64 { return int64(len(m.b)) }
func (m *memory) ReadAt(p []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return copy(p, m.b[off:]), nil
}
func (m *memory) WriteAt(p []byte, off int64) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.lose != nil && m.lose(off, len(p)) {
		return len(p), nil
	}
	return copy(m.b[off:], p), nil
}
func (m *memory) WriteFUA(p []byte, off int64) error { _, err := m.WriteAt(p, off); return err }
func (m *memory) Flush() error                       { return nil }
func (m *memory) Discard(off, n int64) error         { return m.WriteZeroes(off, n) }
func (m *memory) WriteZeroes(off, n int64) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	clear(m.b[off : off+n])
	return nil
}

func TestAll(t *testing.T) {
	m := &memory{b: make([]byte, 16<<20)}
	sum, err := All(m, 1)
	if err != nil {
		t.Fatal(err)
	}
	if got, _ := Sum(strings.NewReader(string(m.b))); got != sum {
		t.Errorf("sum is %s, that of the disk %s", sum, got)
	}
}

func TestLostWriteIsFound(t *testing.T) {
	for name, lose := range map[string]func(int64, int) bool{
		"one size":    func(_ int64, n int) bool { return n == 128<<10 },
		"one address": func(off int64, n int) bool { return off <= 8<<20+300<<10 && off+int64(n) > 8<<20+300<<10 },
	} {
		if _, err := All(&memory{b: make([]byte, 16<<20), lose: lose}, 1); err == nil || !strings.Contains(err.Error(), "wrong data") {
			t.Errorf("%s: %v, want wrong data", name, err)
		}
	}
	// The 40th write is lost, and so are all later ones to its first byte, or
	// that could hide it.
	ctx, written := afterWrites(t, 100)
	n, at := 0, int64(-1)
	m := &memory{b: make([]byte, 16<<20), lose: func(off int64, size int) bool {
		written()
		if n++; n == 40 {
			at = off
		}
		return at >= off && at < off+int64(size)
	}}
	if _, _, err := Until(ctx, m, 1); err == nil {
		t.Error("Until has not found a lost write")
	}
}

// afterWrites ends a context at the nth call of the function, so that a test
// takes as many requests on a busy machine as on an idle one.
func afterWrites(t *testing.T, n int) (context.Context, func()) {
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	return ctx, func() {
		if n--; n == 0 {
			cancel()
		}
	}
}

func TestUntil(t *testing.T) {
	ctx, written := afterWrites(t, 100)
	m := &memory{b: make([]byte, 16<<20), lose: func(int64, int) bool { written(); return false }}
	n, longest, err := Until(ctx, m, 1)
	if err != nil || n < 100 || longest == 0 {
		t.Errorf("%d requests, longest %v, error %v", n, longest, err)
	}
}

var _ Disk = (*Device)(nil)
