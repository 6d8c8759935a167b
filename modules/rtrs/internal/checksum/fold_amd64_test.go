package checksum

import (
	"hash/crc32"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

var folded = map[string]*crc32.Table{"Castagnoli": castagnoli, "IEEE": crc32.IEEETable}

var polynomials = map[uint32]*moves{crc32.Castagnoli: castagnoliMoves, crc32.IEEE: ieeeMoves}

func TestFold(t *testing.T) {
	if !folds {
		t.Skip("this CPU has no AVX-512 with VPCLMULQDQ: folding is not tested")
	}
	buf := guarded(t, 8<<10)
	copy(buf, random(len(buf)))
	for name, tab := range folded {
		m := movesOf(tab)
		for n := foldMin; n <= len(buf); n++ {
			for _, b := range [][]byte{buf[:n], buf[len(buf)-n:]} {
				if got, want := fold(7, m, b), crc32.Update(7, tab, b); got != want {
					t.Fatalf("%s, %d bytes: %#x, want %#x", name, n, got, want)
				}
			}
		}
	}
}

func TestFoldAllocatesNothing(t *testing.T) {
	buf := random(4 << 10)
	for name, tab := range folded {
		if n := testing.AllocsPerRun(100, func() { Update(0, tab, buf) }); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

// guarded returns n bytes, a multiple of a page, that nobody may read beyond at
// either end.
func guarded(t *testing.T, n int) []byte {
	t.Helper()
	page := os.Getpagesize()
	b, err := unix.Mmap(-1, 0, page+n+page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(b) })
	for _, guard := range [][]byte{b[:page], b[page+n:]} {
		if err := unix.Mprotect(guard, unix.PROT_NONE); err != nil {
			t.Fatal(err)
		}
	}
	return b[page:][:n:n]
}

// The CRC of a bit and zeros behind it is a power of x by definition: of x^32
// for the last bit of all.
func TestPowers(t *testing.T) {
	const limit = 1000
	for poly := range polynomials {
		x, tab := powers(poly, limit), crc32.MakeTable(poly)
		for n := 32; n < limit; n++ {
			msg := make([]byte, 1+(n-32)/8)
			msg[0] = 0x80 >> (n % 8) // reflected: the last bit of a byte is its highest
			crc := ^crc32.Update(^uint32(0), tab, msg)
			if got, want := x(n), uint64(crc)<<32; got != want {
				t.Fatalf("%#x: x^%d: %#x, want %#x", poly, n, got, want)
			}
		}
		for n := range 32 {
			if got, want := x(n), uint64(1)<<(63-n); got != want {
				t.Errorf("%#x: x^%d: %#x, want %#x", poly, n, got, want)
			}
		}
		// x^-1 times x is 1: the polynomial is added where x^32 comes up.
		if got := x(-1)>>1 ^ uint64(poly)<<32; x(-1)&(1<<32) == 0 || got>>32 != 1<<31 {
			t.Errorf("%#x: x^-1 is %#x", poly, x(-1))
		}
	}
}

// The first 128 bits of the product of a polynomial and its inverse are 1.
func TestInverse(t *testing.T) {
	for poly := range polynomials {
		q := inverse(poly)
		var product [2]uint64
		for i := range 33 {
			if whole(poly)>>i&1 != 0 {
				product[0] ^= q[0] << i
				product[1] ^= q[1]<<i | q[0]>>(64-i)
			}
		}
		if product != [2]uint64{1, 0} {
			t.Errorf("%#x times %#x is %#x", poly, q, product)
		}
	}
}

// foldBlocks reads moves by these places.
func TestMoves(t *testing.T) {
	for poly, m := range polynomials {
		x := powers(poly, 3000)
		for i, bytes := range []int{256, 192, 128, 64} {
			if got, want := m.ahead[i], (move{x(8*bytes + 63), x(8*bytes - 1)}); got != want {
				t.Errorf("%#x, %d bytes ahead: %#x, want %#x", poly, bytes, got, want)
			}
		}
		for _, c := range []struct{ behind, part, bytes int }{{0, 0, 48}, {0, 3, 0}, {1, 3, 1}, {63, 0, 111}, {63, 3, 63}} {
			if got, want := m.end[c.behind][c.part], (move{x(8*c.bytes + 63), x(8*c.bytes - 1)}); got != want {
				t.Errorf("%#x, part %d with %d bytes behind: %#x, want %#x", poly, c.part, c.behind, got, want)
			}
		}
		if m.inverse != inverse(poly) || m.p != [2]uint64{whole(poly)} {
			t.Errorf("%#x: divided by %#x, %#x", poly, m.p, m.inverse)
		}
	}
}

// foldBlocks has these places as numbers.
func TestLayoutOfMoves(t *testing.T) {
	var m moves
	for _, c := range []struct {
		name      string
		got, want uintptr
	}{
		{"end", unsafe.Offsetof(m.end), 64},
		{"inverse", unsafe.Offsetof(m.inverse), 4160},
		{"p", unsafe.Offsetof(m.p), 4176},
	} {
		if c.got != c.want {
			t.Errorf("%s is at %d, the loop reads it at %d", c.name, c.got, c.want)
		}
	}
}
