// Package checksum continues a CRC over payload that may not be in the CPU's
// cache.
//
// CRC32C and the CRC-32 of IEEE 802.3 are folded where the CPU multiplies without
// carries in registers of 512 bits, after Intel's "Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ Instruction" (fold_amd64.go). Elsewhere
// hash/crc32 sums them up, and the memory is asked for ahead. Other polynomials
// are left to hash/crc32. A CRC32C of a few bytes is one call of the CPU's
// instruction for it.
package checksum

import "hash/crc32"

// ahead is the distance in bytes at which memory is prefetched. The CRC
// instructions read a block in three places at once. The CPU's own prefetcher
// does not follow that, and without prefetching they wait for each line.
const ahead = 4096

// foldMin is the least number of bytes that fold takes. It is faster than
// hash/crc32 from there on (BenchmarkUpdate).
const foldMin = 64

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Update is crc32.Update, and faster.
func Update(crc uint32, tab *crc32.Table, b []byte) uint32 {
	switch {
	case len(b) == 0:
		return crc
	case len(b) < foldMin && sums && tab == castagnoli:
		return sumShort(crc, &b[0], len(b))
	}
	return update(crc, tab, b)
}

// update is Update for what is not short, or of another polynomial.
func update(crc uint32, tab *crc32.Table, b []byte) uint32 {
	if m := movesOf(tab); m != nil && len(b) >= foldMin {
		return fold(crc, m, b)
	}
	if folds {
		return crc32.Update(crc, tab, b)
	}
	return inPages(crc, tab, b)
}

// InCache is Update for memory that the cache holds: it is not asked for ahead.
func InCache(crc uint32, tab *crc32.Table, b []byte) uint32 {
	if m := movesOf(tab); m != nil && len(b) >= foldMin {
		return fold(crc, m, b)
	}
	return crc32.Update(crc, tab, b)
}

// inPages is crc32.Update. On memory that is in the cache it is as fast, on other
// memory two to three times as fast.
func inPages(crc uint32, tab *crc32.Table, b []byte) uint32 {
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
