package checksum

import (
	"hash/crc32"

	"golang.org/x/sys/cpu"
)

// A block of bytes is a polynomial A, its first bit the highest power. In front
// of D more bits it counts A*x^D, and the CRC does not change when that is
// replaced by anything that is the same modulo P. So the block is multiplied by
// the constant x^D mod P and added, that is XORed, to the block D bits further
// on. In the end 16 bytes with the CRC of all are left.
//
// Those are divided by P from bit 0 of a register on, the highest power. Bit by
// bit P is subtracted where a one is left; the remainder behind the 128 bits is
// the CRC. So the quotient Q has the product Q*P that is the same as the 16
// bytes in these 128 bits: it is the 16 bytes times the inverse of P, cut off
// after 128 bits. P has 33 bits: of Q*P only the last 64 bits of Q reach
// behind.

// folds reports whether the CPU has the instructions of foldBlocks and the
// operating system saves their registers.
var folds = cpu.X86.HasAVX512F && cpu.X86.HasAVX512BW && cpu.X86.HasAVX512VL &&
	cpu.X86.HasAVX512VPCLMULQDQ && cpu.X86.HasPCLMULQDQ

// Read by foldBlocks alone.
var (
	castagnoliMoves = newMoves(crc32.Castagnoli)
	ieeeMoves       = newMoves(crc32.IEEE)
)

// movesOf returns the constants of fold for the polynomial of tab, or nil if
// that is not folded.
func movesOf(tab *crc32.Table) *moves {
	switch {
	case !folds:
		return nil
	case tab == castagnoli:
		return castagnoliMoves
	case tab == crc32.IEEETable:
		return ieeeMoves
	}
	return nil
}

// fold is crc32.Update for at least foldMin bytes. It is not preempted: 64 KiB,
// the most that a frame of iWARP has, take 6 us when they come from memory.
func fold(crc uint32, m *moves, b []byte) uint32 {
	_ = b[foldMin-1]
	return foldBlocks(crc, &b[0], len(b), m)
}

//go:noescape
func foldBlocks(crc uint32, p *byte, n int, m *moves) uint32

// A move takes 16 bytes on by a distance: factors of their first eight bytes and
// of the others.
type move [2]uint64

// moves are the factors of foldBlocks, laid out as it reads them.
type moves struct {
	ahead   [4]move     // by 256, 192, 128 and 64 bytes
	end     [64][4]move // to the end of four times 16 bytes and 0 to 63 bytes behind them
	inverse [2]uint64   // of the polynomial, its first 128 bits
	p       [2]uint64   // the polynomial, all 33 bits of it, and zeros
}

func newMoves(poly uint32) *moves {
	const longest = 256 * 8 // bits
	x := powers(poly, longest+64)
	by := func(bytes int) move {
		// The first eight bytes are 64 bits before the others. Of two reflected
		// factors the product has one bit less than two registers of 64: as 128
		// bits it is the product times x, and the factor makes up for that.
		return move{x(bytes*8 + 64 - 1), x(bytes*8 - 1)}
	}
	m := &moves{inverse: inverse(poly), p: [2]uint64{whole(poly)}}
	for i := range m.ahead {
		m.ahead[i] = by(64 * (4 - i))
	}
	for n := range m.end {
		for i := range m.end[n] {
			m.end[n][i] = by(16*(3-i) + n)
		}
	}
	return m
}

// powers returns a function of n that is x^n modulo the polynomial poly, for
// -1 <= n < limit. As everywhere in these CRCs the bits are reflected: bit 63 is
// the coefficient of x^0.
func powers(poly uint32, limit int) func(n int) uint64 {
	table := make([]uint32, 1+limit) // bit 31 is x^0
	r := poly<<1 | 1                 // x^-1 = (P - 1) / x
	for i := range table {
		table[i] = r
		r = r>>1 ^ (r&1)*poly // times x
	}
	return func(n int) uint64 { return uint64(table[1+n]) << 32 }
}

// whole is poly with x^32 in bit 0; crc32 omits that term.
func whole(poly uint32) uint64 { return uint64(poly)<<1 | 1 }

// inverse is the quotient of a one with zeros behind it and poly.
func inverse(poly uint32) (q [2]uint64) {
	r := uint64(1)
	for i := range 128 {
		if r&1 != 0 {
			q[i/64] |= 1 << (i % 64)
			r ^= whole(poly)
		}
		r >>= 1
	}
	return q
}
