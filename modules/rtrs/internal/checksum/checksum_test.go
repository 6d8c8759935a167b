package checksum

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

var tables = map[string]*crc32.Table{"Castagnoli": crc32.MakeTable(crc32.Castagnoli), "IEEE": crc32.IEEETable}

func TestUpdateIsThatOfTheStandardLibrary(t *testing.T) {
	buf := make([]byte, 5*ahead+100)
	rand.NewChaCha8([32]byte{1}).Read(buf)
	for name, tab := range tables {
		for _, n := range []int{0, 1, ahead/8 - 1, ahead / 8, ahead - 1, ahead, ahead + 1, 2 * ahead, 3*ahead + 7, len(buf)} {
			for _, from := range []int{0, 1, 63} {
				b := buf[min(from, len(buf)-n):][:n]
				if got, want := Update(7, tab, b), crc32.Update(7, tab, b); got != want {
					t.Errorf("%s of %d bytes: %#x, want %#x", name, n, got, want)
				}
			}
		}
	}
}

// BenchmarkUpdate goes through memory that the cache holds, and through more
// than it holds.
func BenchmarkUpdate(b *testing.B) {
	for _, total := range []int{64 << 10, 256 << 20} {
		buf := make([]byte, total)
		rand.NewChaCha8([32]byte{1}).Read(buf)
		for _, n := range []int{4 << 10, 64 << 10} {
			for name, update := range map[string]func(uint32, *crc32.Table, []byte) uint32{"checksum": Update, "crc32": crc32.Update} {
				b.Run(fmt.Sprintf("%d of %d KiB, %s", n>>10, total>>10, name), func(b *testing.B) {
					b.SetBytes(int64(n))
					for i := range b.N {
						update(0, tables["Castagnoli"], buf[i*n%total:][:n])
					}
				})
			}
		}
	}
}
