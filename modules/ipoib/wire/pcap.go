package wire

import (
	"encoding/binary"
	"time"
)

// Captures in the form of pcap files, for tcpdump and Wireshark. The file
// header and record headers are little endian, the captured frames big endian.

// LinkTypeIPoIB is the link type of captured IPoIB frames: 40 octets in the place
// of a global route header, then the frame.
const LinkTypeIPoIB = 242

const pcapPseudoLen = 40

// PcapHeader returns the header of a capture file.
func PcapHeader() []byte {
	b := make([]byte, 0, 24)
	le := binary.LittleEndian
	b = le.AppendUint32(b, 0xa1b2c3d4) // microseconds
	b = le.AppendUint16(b, 2)
	b = le.AppendUint16(b, 4)
	b = le.AppendUint64(b, 0)
	b = le.AppendUint32(b, 1<<18) // longest record
	return le.AppendUint32(b, LinkTypeIPoIB)
}

// AppendPcapRecord appends the record of a frame from the interface src to dst,
// at the time t, to b.
func AppendPcapRecord(b []byte, t time.Time, src, dst Address, frame Frame) []byte {
	le := binary.LittleEndian
	n := uint32(pcapPseudoLen + len(frame))
	b = le.AppendUint32(b, uint32(t.Unix()))
	b = le.AppendUint32(b, uint32(t.Nanosecond()/1000))
	b = le.AppendUint32(b, n)
	b = le.AppendUint32(b, n)
	b = append(b, 0x60, 0, 0, 0)
	b = be.AppendUint32(b, src.QPN())
	b = append(b, src[4:]...)
	b = append(b, dst[4:]...)
	return append(b, frame...)
}
