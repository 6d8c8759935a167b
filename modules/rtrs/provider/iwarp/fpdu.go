package iwarp

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/checksum"
)

// An FPDU is the frame of RFC 5044 around one DDP segment: length, segment,
// pad to a multiple of four, CRC. The CRC covers length to pad and travels
// with its least significant byte first. Its four bytes are always there; with
// CRC off they are zero on the way out and ignored on the way in.

const crcLen = 4

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// crcUpdate continues a CRC32C. The first crc is 0.
func crcUpdate(crc uint32, b []byte) uint32 { return checksum.Update(crc, castagnoli, b) }

func putCRC(b []byte, crc uint32) { binary.LittleEndian.PutUint32(b, crc) }
func getCRC(b []byte) uint32      { return binary.LittleEndian.Uint32(b) }

// padLen returns the number of pad bytes behind a ULPDU of n bytes.
func padLen(n int) int { return -(2 + n) & 3 }

// sealFPDU adds pad and CRC to an FPDU in one piece. b starts with the length
// field and has room for the tail. It returns the whole frame.
func sealFPDU(b []byte, crcOn bool) []byte {
	n := 2 + fpduHeader(b).length()
	end := n + padLen(n-2)
	clear(b[n : end+crcLen])
	if crcOn {
		putCRC(b[end:], crcUpdate(0, b[:end]))
	}
	return b[:end+crcLen]
}
