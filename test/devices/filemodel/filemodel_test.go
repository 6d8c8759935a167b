package filemodel

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

const steps = 3000

// after n steps from now.
func after(t *Tester, n int) func() bool {
	end := t.Steps() + n
	return func() bool { return t.Steps() == end }
}

func newTester(t *testing.T, seed uint64) *Tester {
	t.Helper()
	m, err := New(Config{Dir: t.TempDir(), Seed: seed, MaxSize: 256 << 10})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.Close() })
	return m
}

func TestFilesOfAnOrdinaryFileSystemPass(t *testing.T) {
	m := newTester(t, 1)
	if err := m.Run(after(m, steps)); err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if err := m.Check(); err != nil {
		t.Error(err)
	}
	if err := m.Run(after(m, 100)); err != nil {
		t.Errorf("after it was closed: %v", err)
	}
}

func TestASeedDoesTheSameThings(t *testing.T) {
	a, b, other := newTester(t, 7), newTester(t, 7), newTester(t, 8)
	for _, m := range []*Tester{a, b, other} {
		if err := m.Run(after(m, 500)); err != nil {
			t.Fatal(err)
		}
	}
	content := func(m *Tester) (all []byte) {
		for i := range m.files {
			b, err := os.ReadFile(m.files[i].path)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, b...)
		}
		return all
	}
	if !bytes.Equal(content(a), content(b)) {
		t.Error("the same seed leaves different files")
	}
	if bytes.Equal(content(a), content(other)) {
		t.Error("another seed leaves the same files")
	}
}

func TestDamageIsFound(t *testing.T) {
	write := func(data string, off int64) func(t *testing.T, path string) {
		return func(t *testing.T, path string) {
			f, err := os.OpenFile(path, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			if _, err := f.WriteAt([]byte(data), off); err != nil {
				t.Fatal(err)
			}
		}
	}
	truncate := func(size int64) func(t *testing.T, path string) {
		return func(t *testing.T, path string) {
			if err := os.Truncate(path, size); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, path string)
		words  string
	}{
		{"a byte that changed", write("\xff", 1000), "byte 1000 is 0xff"},
		{"zeroes in place of data", write(strings.Repeat("\x00", 64), 4096), "holds zeroes, and must hold what step 1 wrote there"},
		{"data of another place", write("\x07\x00\x00\x01\x00\x00\x00\x00", 800), "which was never written there"},
		{"a lost end", truncate(9000), "it has 9000 bytes, and must have 10000"},
		{"an end too far", truncate(10001), "it has 10001 bytes, and must have 10000"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newTester(t, 1)
			f := m.files[0]
			if err := f.write(0, 10000, 1); err != nil {
				t.Fatal(err)
			}
			if err := m.Check(); err != nil {
				t.Fatal(err)
			}
			c.damage(t, f.path)
			if err := m.Check(); err == nil || !strings.Contains(err.Error(), c.words) || !strings.Contains(err.Error(), "seed 1") {
				t.Errorf("%v; want %q in it, and the seed", err, c.words)
			}
		})
	}
}

// A run must find damage by itself, by reading and by mapping.
func TestDamageIsFoundInARun(t *testing.T) {
	for _, name := range []string{"read", "mapped read"} {
		t.Run(name, func(t *testing.T) {
			m := newTester(t, 3)
			f := m.files[0]
			if err := f.write(0, 5000, 1); err != nil {
				t.Fatal(err)
			}
			f.want[4321] ^= 1
			for _, o := range ops {
				if o.name != name {
					continue
				}
				if err := o.do(f, 4000, 1000, 2); err == nil || !strings.Contains(err.Error(), "byte 4321") {
					t.Errorf("%v", err)
				}
			}
		})
	}
}

func TestEveryOpIsDone(t *testing.T) {
	m := newTester(t, 5)
	done := map[string]bool{}
	for range steps {
		if err := m.Run(after(m, 1)); err != nil {
			t.Fatal(err)
		}
		for _, f := range m.files {
			for _, o := range ops {
				if n := len(f.trace); n > 0 && strings.Contains(f.trace[n-1], " "+o.name+" ") {
					done[o.name] = true
				}
			}
		}
	}
	if len(done) != len(ops) {
		t.Errorf("of %d things %v are done", len(ops), done)
	}
}
