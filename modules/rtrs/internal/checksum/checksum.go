// Package checksum continues a CRC over payload that is not in the CPU's cache.
package checksum

import "hash/crc32"

// ahead is how far the memory is asked for before it is summed up. The CRC
// instructions go through a block in three places at once, which the CPU's own
// prefetching does not follow: without help they wait for each line.
const ahead = 4096

// Update is crc32.Update. On memory that is in the cache it is as fast, on other
// memory two to three times as fast (BenchmarkUpdate).
func Update(crc uint32, tab *crc32.Table, b []byte) uint32 {
	if len(b) >= ahead/8 {
		prefetch(&b[0], min(len(b), ahead))
	}
	for len(b) > ahead {
		prefetch(&b[ahead], min(len(b)-ahead, ahead))
		crc = crc32.Update(crc, tab, b[:ahead])
		b = b[ahead:]
	}
	return crc32.Update(crc, tab, b)
}
