package checksum

import (
	"hash/crc32"
	"testing"
)

// No byte beside those of a sum is read: there are pages behind both ends of the
// memory that nobody may read.
func TestSumShort(t *testing.T) {
	if !sums {
		t.Skip("this CPU has no SSE 4.2: hash/crc32 sums up")
	}
	buf := guarded(t, 4<<10)
	copy(buf, random(len(buf)))
	for n := 1; n <= 2*foldMin; n++ {
		for _, b := range [][]byte{buf[:n], buf[len(buf)-n:]} {
			if got, want := sumShort(7, &b[0], n), crc32.Update(7, castagnoli, b); got != want {
				t.Fatalf("%d bytes: %#x, want %#x", n, got, want)
			}
		}
	}
}
