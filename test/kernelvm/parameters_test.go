package kernelvm

import (
	"bytes"
	"encoding/binary"
	"os"
	"testing"
	"time"
)

// Attributes of messages of the connection manager.
const (
	attrREQ = 0x10
	attrREP = 0x13
)

// connects are the messages with an attribute in a capture so far, without their headers:
// offsets count from the byte 24 of the management datagram, as in
// docs/extend/protocol/rocev2.md.
func (r *recording) connects(t *testing.T, attribute uint16) (all [][]byte) {
	t.Helper()
	b, err := os.ReadFile(r.file)
	if err != nil {
		t.Fatal(err)
	}
	const ethernet, ipv4, udp, bth, deth = 14, 20, 8, 12, 8
	const mad = ethernet + ipv4 + udp + bth + deth
	for b = b[min(24, len(b)):]; len(b) >= 16; {
		n := 16 + int(binary.LittleEndian.Uint32(b[8:]))
		if n > len(b) {
			break
		}
		p := b[16:n]
		b = b[n:]
		if len(p) >= mad+256 && p[ethernet+ipv4+udp] == 0x64 && binary.BigEndian.Uint16(p[mad+16:]) == attribute {
			all = append(all, p[mad+24:mad+256])
		}
	}
	return all
}

// The parameters on the wire when our client connects to the kernel's server,
// and the kernel's to ours, taken from captured packets of the real processes.
func TestConnectParameters(t *testing.T) {
	for _, pair := range [][2]side{{ours, kernel}, {kernel, ours}} {
		b := cell{column: rocev2, from: pair[0], to: pair[1], invalidate: true}.set(t)
		b.c.Unmap(t, b.mapDisk(t, "rw", fast))
		var reqs, reps [][]byte
		eventually(t, 30*time.Second, "three REQs and REPs are captured", func() bool {
			reqs, reps = b.records[fast].connects(t, attrREQ), b.records[fast].connects(t, attrREP)
			return len(reqs) >= 3 && len(reps) >= 3
		})
		b.records[fast].stop()
		t.Run("R-002 private data, from "+string(pair[0]), func(t *testing.T) {
			for _, m := range reqs {
				if consumer := m[140+36:]; len(consumer) < 56 || !bytes.Equal(consumer[:6], []byte{0, 0, 0xbd, 0x1b, 0, 2}) {
					t.Errorf("consumer's data begins with %x", consumer[:6])
				}
			}
		})
		t.Run("R-003 service id, from "+string(pair[0]), func(t *testing.T) {
			for _, m := range reqs {
				if id := binary.BigEndian.Uint64(m[8:]); id != 0x1060000+1234 {
					t.Errorf("service id %#x", id)
				}
			}
		})
		t.Run("R-004 depths, retries, no SRQ and no flow control, from "+string(pair[0]), func(t *testing.T) {
			for _, m := range reqs {
				if m[35] != 0 || m[39] != 0 || m[47]&7 != 7 || m[50]&7 != 7 || m[51]>>3&1 != 0 || m[43]&1 != 0 {
					t.Errorf("reads served %d and issued %d, retries %d and %d, SRQ %d, flow control %d", m[35], m[39], m[47]&7, m[50]&7, m[51]>>3&1, m[43]&1)
				}
			}
			for _, m := range reps {
				if m[24] != 0 || m[25] != 0 || m[27]>>5 != 7 || m[27]>>4&1 != 0 || m[26]&1 != 0 {
					t.Errorf("answer: reads served %d and issued %d, retries %d, SRQ %d, flow control %d", m[24], m[25], m[27]>>5, m[27]>>4&1, m[26]&1)
				}
			}
		})
		t.Run("R-005 answer, from "+string(pair[1]), func(t *testing.T) {
			for _, m := range reps {
				if p := m[36:]; !bytes.Equal(p[:6], []byte{0xbd, 0x1b, 0, 2, 0, 0}) {
					t.Errorf("private data begins with %x", p[:6])
				}
			}
		})
	}
}
