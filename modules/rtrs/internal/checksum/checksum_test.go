package checksum

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// cases are both polynomials and, on every CPU, all that Update may do. They
// come in order: fuzzing compares the coverage of runs.
var cases = []struct {
	name   string
	update func(uint32, *crc32.Table, []byte) uint32
	tab    *crc32.Table
}{
	{"Update of Castagnoli", Update, crc32.MakeTable(crc32.Castagnoli)},
	{"Update of IEEE", Update, crc32.IEEETable},
	{"InCache of Castagnoli", InCache, crc32.MakeTable(crc32.Castagnoli)},
	{"InCache of IEEE", InCache, crc32.IEEETable},
	{"inPages of Castagnoli", inPages, crc32.MakeTable(crc32.Castagnoli)},
	{"inPages of IEEE", inPages, crc32.IEEETable},
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{1}).Read(b)
	return b
}

func TestUpdateIsThatOfTheStandardLibrary(t *testing.T) {
	const short, long = 4500, 1 << 20
	buf := random(long + 64)
	var sizes []int
	for n := range short + 1 {
		sizes = append(sizes, n)
	}
	for _, n := range []int{2 * ahead, 3 * ahead, 5 * ahead, 64 << 10, long} {
		for d := -300; d <= 300 && n+d <= long; d += 25 {
			sizes = append(sizes, n+d)
		}
	}
	for _, c := range cases {
		for _, n := range sizes {
			for from := range 64 {
				if n > short && from%9 != 0 {
					continue
				}
				b, crc := buf[from:][:n:n], rand.Uint32()
				if got, want := c.update(crc, c.tab, b), crc32.Update(crc, c.tab, b); got != want {
					t.Fatalf("%s from %#x, %d bytes at %d: %#x, want %#x", c.name, crc, n, from, got, want)
				}
			}
		}
	}
}

func TestUpdateOfAnotherPolynomial(t *testing.T) {
	b, tab := random(2*ahead), crc32.MakeTable(crc32.Koopman)
	for _, c := range cases {
		if got, want := c.update(7, tab, b), crc32.Update(7, tab, b); got != want {
			t.Errorf("%s: %#x, want %#x", c.name, got, want)
		}
	}
}

func TestUpdateContinues(t *testing.T) {
	buf := random(64 << 10)
	for _, c := range cases {
		for range 100 {
			var crc uint32
			for b := buf; len(b) > 0; {
				n := min(1+rand.IntN(1<<rand.IntN(15)), len(b))
				crc = c.update(crc, c.tab, b[:n])
				b = b[n:]
			}
			if want := crc32.Checksum(buf, c.tab); crc != want {
				t.Fatalf("%s in pieces: %#x, want %#x", c.name, crc, want)
			}
		}
	}
}

func FuzzUpdate(f *testing.F) {
	f.Add(uint32(0), []byte("123456789"))
	f.Add(^uint32(0), random(9*foldMin+1))
	f.Fuzz(func(t *testing.T, crc uint32, b []byte) {
		for _, c := range cases {
			if got, want := c.update(crc, c.tab, b), crc32.Update(crc, c.tab, b); got != want {
				t.Errorf("%s: %#x, want %#x", c.name, got, want)
			}
		}
	})
}

// BenchmarkUpdate goes through memory that the cache holds, and through more
// than it holds.
func BenchmarkUpdate(b *testing.B) {
	b.Run("Castagnoli", func(b *testing.B) { benchmark(b, castagnoli) })
	b.Run("IEEE", func(b *testing.B) { benchmark(b, crc32.IEEETable) })
}

func benchmark(b *testing.B, tab *crc32.Table) {
	for _, total := range []int{64 << 10, 256 << 20} {
		buf := random(total)
		for _, n := range []int{18, 64, 128, 1 << 10, 4 << 10, 64 << 10} {
			for _, c := range []struct {
				name   string
				update func(uint32, *crc32.Table, []byte) uint32
			}{{"Update", Update}, {"inPages", inPages}, {"crc32", crc32.Update}} {
				b.Run(fmt.Sprintf("%d of %d KiB, %s", n, total>>10, c.name), func(b *testing.B) {
					b.SetBytes(int64(n))
					for i := range b.N {
						c.update(0, tab, buf[i*n%total:][:n])
					}
				})
			}
		}
	}
}
