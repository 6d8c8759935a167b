package e2e

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// The code below decodes RFC 5044 and 5041 on its own, without the provider.

// mpaFrame cuts a start-up frame off a stream: 16 bytes of key, flags,
// revision, length, private data.
func mpaFrame(stream []byte, key string) (private, rest []byte, err error) {
	if len(stream) < 20 || string(stream[:16]) != key {
		return nil, nil, fmt.Errorf("the stream begins with %q, want %q", stream[:min(16, len(stream))], key)
	}
	n := 20 + int(binary.BigEndian.Uint16(stream[18:]))
	if len(stream) < n {
		return nil, nil, fmt.Errorf("start-up frame of %d bytes in a stream of %d", n, len(stream))
	}
	return stream[20:n], stream[n:], nil
}

// fpduLen is the length of the frame that b begins with: a length, a DDP
// segment of that length, up to 3 bytes of pad, a CRC. 0: it is cut off.
func fpduLen(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	whole := (2+int(binary.BigEndian.Uint16(b))+3)&^3 + 4
	if whole > len(b) {
		return 0
	}
	return whole
}

// taggedWrites adds up the payload of RDMA Writes: tagged segments (T in the
// first byte) of opcode 0, with 14 bytes of header. All CRCs must be right.
func taggedWrites(t *testing.T, stream []byte) (total int64) {
	t.Helper()
	for len(stream) > 0 {
		n := fpduLen(stream)
		if n == 0 {
			t.Fatalf("%d bytes at the end of a stream at rest are no frame", len(stream))
		}
		body, crc := stream[:n-4], binary.LittleEndian.Uint32(stream[n-4:])
		if crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)) != crc {
			t.Fatalf("a frame of %d bytes has a wrong CRC", n)
		}
		length := int64(binary.BigEndian.Uint16(body))
		if length >= 14 && body[2]&0x80 != 0 && body[3]&0x0f == 0 {
			total += length - 14
		}
		stream = stream[n:]
	}
	return total
}

// tapRig is a rig whose client reaches the server through a tap.
func tapRig(t *testing.T, size int64) (*rig, *tap) {
	t.Helper()
	r := &rig{T: lab.New(t), t: t}
	dir := r.Image("disk.img", size)
	r.image = filepath.Join(dir, "disk.img")
	r.server = r.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	r.client = r.Client(lab.ClientOptions{})
	p := newTap(t, r.server.Addrs[0])
	r.device = r.Map(r.client, "disk.img", r.server, func(m *controlpb.MapRequest) { m.Paths = []string{p.addr} })
	return r, p
}

// TestCaptureShowsRTRSOverIWARP looks at the bytes between client and server
// while the whole device is written and read.
func TestCaptureShowsRTRSOverIWARP(t *testing.T) {
	const size = 16 << 20
	r, p := tapRig(t, size)
	run(t, "nbdcopy", "--flush", randomFile(t, size), r.unixURI())
	run(t, "nbdcopy", r.unixURI(), "null:")
	eventually(t, "nbdcopy has left and the device is unmapped, so that the streams rest", func() bool {
		return r.client.Unmap(r.device.Name, false) == nil
	})
	links := p.all()
	if len(links) != 3 {
		t.Fatalf("%d connections, want one for control and one per pump", len(links))
	}
	var written, read int64
	for i, k := range links {
		request, up, err := mpaFrame(k.stream(toServer), "MPA ID Req Frame")
		if err != nil {
			t.Fatal(err)
		}
		reply, down, err := mpaFrame(k.stream(toClient), "MPA ID Rep Frame")
		if err != nil {
			t.Fatal(err)
		}
		checkRTRS(t, i, request, reply)
		written += taggedWrites(t, up)
		read += taggedWrites(t, down)
	}
	t.Logf("tagged RDMA Writes: %d bytes to the server, %d to the client, for a device of %d", written, read, size)
	if written < size || read < size {
		t.Errorf("the capture holds %d and %d bytes of RDMA Writes, less than the device", written, read)
	}
	if max := int64(size + size/8); written > max || read > max {
		t.Errorf("the capture holds %d and %d bytes of RDMA Writes, much more than the device", written, read)
	}
	checkWithTshark(t, p.pcap(t))
}

// checkRTRS finds the 56 bytes of RTRS that each start-up frame ends with:
// docs/extend/protocol/rtrs.md, "Connection request".
func checkRTRS(t *testing.T, i int, request, reply []byte) {
	t.Helper()
	if len(request) < 56 || len(reply) < 56 {
		t.Fatalf("connection %d: %d and %d bytes of private data", i, len(request), len(reply))
	}
	req, rsp := request[len(request)-56:], reply[len(reply)-56:]
	if !bytes.Equal(req[2:4], []byte{0xbd, 0x1b}) || !bytes.Equal(rsp[0:2], []byte{0xbd, 0x1b}) {
		t.Errorf("connection %d: magic % x and % x", i, req[2:4], rsp[0:2])
	}
	if cid := binary.LittleEndian.Uint16(req[6:]); int(cid) != i {
		t.Errorf("connection %d asks for cid %d", i, cid)
	}
	if errno := binary.LittleEndian.Uint16(rsp[4:]); errno != 0 {
		t.Errorf("connection %d is refused with %d", i, errno)
	}
}

// checkWithTshark has another decoder look at the same bytes.
func checkWithTshark(t *testing.T, file string) {
	t.Helper()
	out := run(t, "tshark", "-r", file, "-V", "-O", "iwarp_mpa,iwarp_ddp_rdmap", "-Y", "iwarp_mpa")
	for what, least := range map[string]int{
		"Request frame header": 3, "Reply frame header": 3, "OpCode: Write": 512, "Good CRC32": 512,
	} {
		if n := strings.Count(out, what); n < least {
			t.Errorf("tshark sees %d times %q, want at least %d", n, what, least)
		}
	}
	for _, bad := range []string{"Bad CRC", "Malformed"} {
		if strings.Contains(out, bad) {
			t.Errorf("tshark sees %q", bad)
		}
	}
}
