package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// noise is the same at every run.
func noise(seed uint64, n int) []byte {
	r := rand.NewChaCha8([32]byte{byte(seed)})
	b := make([]byte, n)
	r.Read(b)
	return b
}

// insult sends b to a server and waits until that ends the connection. Whoever
// only waits for more is told that nothing more comes.
func insult(network, addr string, b []byte, hangUp bool) error {
	c, err := net.DialTimeout(network, addr, enough)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(enough))
	go func() {
		c.Write(b) // it may be reset meanwhile
		if half, ok := c.(interface{ CloseWrite() error }); ok && hangUp {
			half.CloseWrite()
		}
	}()
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("the connection is still there after %v", enough)
	}
	return nil
}

// fpdu frames a DDP segment, with a good CRC.
func fpdu(segment []byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, uint16(len(segment)))
	b = append(b, segment...)
	b = append(b, make([]byte, -len(b)&3)...)
	return binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}

// tagged is a segment of an RDMA Write.
func tagged(stag uint32, offset uint64, payload []byte) []byte {
	b := []byte{0x80 | 0x40 | 1, 0x40}
	b = binary.BigEndian.AppendUint32(b, stag)
	b = binary.BigEndian.AppendUint64(b, offset)
	return append(b, payload...)
}

// untagged is a segment of a message of the given opcode.
func untagged(opcode byte, queue, number, offset uint32, payload []byte) []byte {
	b := []byte{0x40 | 1, 0x40 | opcode, 0, 0, 0, 0}
	for _, v := range []uint32{queue, number, offset} {
		b = binary.BigEndian.AppendUint32(b, v)
	}
	return append(b, payload...)
}

// connectRequest is the start of a connection as a client sent it, with other
// names of session and path, so that it is a stranger's.
func connectRequest(t *testing.T, recorded []byte) []byte {
	t.Helper()
	private, _, err := mpaFrame(recorded, "MPA ID Req Frame")
	if err != nil {
		t.Fatal(err)
	}
	frame := bytes.Clone(recorded[:20+len(private)])
	copy(frame[len(frame)-56+12:], noise(9, 32))
	return frame
}

// garbageForRTRS are byte streams of peers that are no clients. recorded has
// the bytes of a real one.
func garbageForRTRS(t *testing.T, recorded []byte) []struct {
	name string
	data []byte
} {
	t.Helper()
	hello := connectRequest(t, recorded)
	whole := func(n int) []byte { return bytes.Clone(recorded[:n]) }
	long := whole(20)
	binary.BigEndian.PutUint16(long[18:], 0xffff)
	stranger := bytes.Clone(hello)
	copy(stranger[len(stranger)-56:], noise(3, 56))
	badCRC := fpdu(tagged(1, 0, noise(4, 100)))
	badCRC[len(badCRC)-1] ^= 1
	after := func(b []byte) []byte { return append(bytes.Clone(hello), b...) }
	return []struct {
		name string
		data []byte
	}{
		{"nothing", nil},
		{"noise", noise(1, 64<<10)},
		{"an HTTP request", []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")},
		{"half a key", whole(9)},
		{"half a start-up frame", whole(17)},
		{"a start-up frame without its private data", whole(24)},
		{"private data of 64 KiB", append(long, noise(2, 0xffff)...)},
		{"private data that is not RTRS", stranger},
		{"a good start and then nothing", hello},
		{"a good start and then noise", after(noise(5, 64<<10))},
		{"a good start and half a frame", after(fpdu(tagged(1, 0, noise(6, 1000)))[:500])},
		{"a frame with a wrong CRC", after(badCRC)},
		{"a frame that is too short for a segment", after(fpdu([]byte{0xc1, 0x40}))},
		{"a write to memory that is not there", after(fpdu(tagged(0xdeadbeef, 0, noise(7, 4096))))},
		{"a write to memory of other sessions", after(bytes.Join([][]byte{
			fpdu(tagged(0x100, 0, noise(8, 512))), fpdu(tagged(0x101, 0, noise(8, 512))), fpdu(tagged(0x200, 1<<63, noise(8, 512))),
		}, nil))},
		{"a message with a number from the future", after(fpdu(untagged(3, 0, 77, 0, noise(10, 64))))},
		{"a message to a queue that is not there", after(fpdu(untagged(3, 9, 1, 0, noise(11, 64))))},
		{"a message of an unknown opcode", after(fpdu(untagged(0xb, 0, 1, 0, nil)))},
		{"a message that is not RTRS", after(fpdu(untagged(3, 0, 1, 0, noise(12, 64))))},
		{"the recorded connection once more", recorded},
	}
}

// descriptors counts those that a process has open.
func descriptors(t *testing.T, pid int) int {
	t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// TestGarbageOnTheFabricEndsOnlyItsConnection sends bytes that no client sends
// while a session verifies its data.
func TestGarbageOnTheFabricEndsOnlyItsConnection(t *testing.T) {
	r, p := tapRig(t, 64<<20)
	if _, err := r.dial().WriteAt(noise(1, 4096), 0); err != nil {
		t.Fatal(err)
	}
	recorded := p.all()[0].stream(toServer)
	pid, plugins := r.server.PID(), r.pids()
	before := descriptors(t, pid)
	var running atomic.Bool
	running.Store(true)
	verified := make(chan bool, 1)
	go func() {
		defer running.Store(false)
		verified <- t.Run("fio meanwhile", func(t *testing.T) { fioVerify(t, r.unixURI(), 64<<20, "--rate=8m,8m") })
	}()
	count := 0
	for round := 0; round == 0 || running.Load() && round < 50; round++ {
		for _, g := range garbageForRTRS(t, recorded) {
			if err := insult("tcp", r.server.Addrs[0], g.data, true); err != nil {
				t.Errorf("%s: %v", g.name, err)
			}
			count++
		}
	}
	if !<-verified {
		t.Error("the session beside did not verify its data")
	}
	t.Logf("%d connections with garbage", count)
	if gone, err := r.server.Exited(); gone {
		t.Fatalf("the server ended: %v", err)
	}
	for role, id := range r.pids() {
		if plugins[role] != id {
			t.Errorf("%s was restarted", role)
		}
	}
	eventually(t, "only the real session is left, and no descriptor", func() bool {
		l, err := r.server.API.ListSessions(context.Background(), &controlpb.ListRequest{})
		return err == nil && len(l.Sessions) == 1 && descriptors(t, pid) <= before
	})
	for _, path := range sessionsOf(t, r.client)[0].Paths {
		if path.Reconnects != 0 {
			t.Errorf("path %s was reconnected %d times", path.Dst, path.Reconnects)
		}
	}
}

// TestSilentPeersAreHungUpOn has peers that begin and then say nothing, with
// their connection open.
func TestSilentPeersAreHungUpOn(t *testing.T) {
	r, p := tapRig(t, 1<<20)
	recorded := p.all()[0].stream(toServer)
	silent := map[string][]byte{"at once": nil, "in the start-up frame": recorded[:17]}
	if long() { // RTRS waits half a minute for the other connections of a path
		silent["after a good start"] = connectRequest(t, recorded)
	}
	for name, data := range silent {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := insult("tcp", r.server.Addrs[0], data, false); err != nil {
				t.Error(err)
			}
		})
	}
}

// transmission is an NBD connection up to the first request.
func transmission(export string) []byte {
	b := []byte{0, 0, 0, 3} // fixed newstyle, no zeroes
	b = append(b, "IHAVEOPT\x00\x00\x00\x01"...)
	b = binary.BigEndian.AppendUint32(b, uint32(len(export)))
	return append(b, export...)
}

// nbdRequest is the header of a request.
func nbdRequest(magic uint32, command uint16, offset uint64, n uint32) []byte {
	b := binary.BigEndian.AppendUint32(nil, magic)
	b = binary.BigEndian.AppendUint16(b, 0)
	b = binary.BigEndian.AppendUint16(b, command)
	b = binary.BigEndian.AppendUint64(b, 1)
	b = binary.BigEndian.AppendUint64(b, offset)
	return binary.BigEndian.AppendUint32(b, n)
}

// TestGarbageOnTheNBDSocketEndsOnlyItsConnection is the same for the front end.
func TestGarbageOnTheNBDSocketEndsOnlyItsConnection(t *testing.T) {
	r := newRig(t, rigOptions{size: 64 << 20})
	pids := r.pids()
	before := descriptors(t, pids["frontend-nbd"])
	const magic = 0x25609513
	start := transmission(r.device.Name)
	after := func(b ...[]byte) []byte { return append(bytes.Clone(start), bytes.Join(b, nil)...) }
	garbage := map[string][]byte{
		"nothing":                           nil,
		"noise":                             noise(1, 64<<10),
		"flags that nobody knows":           {0xff, 0xff, 0xff, 0xff},
		"half an option":                    start[:13],
		"an option without end":             append([]byte("\x00\x00\x00\x03IHAVEOPT\x00\x00\x00\x07\xff\xff\xff\xff"), noise(2, 4096)...),
		"a name of 4 GiB":                   []byte("\x00\x00\x00\x03IHAVEOPT\x00\x00\x00\x01\xff\xff\xff\xff"),
		"an export that is not there":       transmission("none"),
		"noise for a request":               after(noise(3, 64<<10)),
		"half a request":                    after(nbdRequest(magic, 0, 0, 512)[:11]),
		"a request with a wrong magic":      after(nbdRequest(magic+1, 0, 0, 512)),
		"a command that is none":            after(nbdRequest(magic, 999, 0, 512)),
		"half a write":                      after(nbdRequest(magic, 1, 0, 4096), noise(4, 1000)),
		"a write of 4 GiB":                  after(nbdRequest(magic, 1, 0, 0xffffffff), noise(5, 1<<20)),
		"a read of 4 GiB":                   after(nbdRequest(magic, 0, 0, 0xffffffff)),
		"a read beyond the end":             after(nbdRequest(magic, 0, 1<<62, 4096)),
		"reads whose answers nobody awaits": after(bytes.Repeat(nbdRequest(magic, 0, 0, 1<<20), 200)),
	}
	// The half write must not reach the device, so fio stays off its place.
	verified := make(chan bool, 1)
	go func() {
		verified <- t.Run("fio meanwhile", func(t *testing.T) { fioVerify(t, r.unixURI(), 64<<20, "--rate=8m,8m") })
	}()
	for name, data := range garbage {
		for network, addr := range map[string]string{"tcp": r.tcp, "unix": r.client.NBD} {
			if err := insult(network, addr, data, true); err != nil {
				t.Errorf("%s over %s: %v", name, network, err)
			}
		}
	}
	if !<-verified {
		t.Error("the connection beside did not verify its data")
	}
	for role, pid := range r.pids() {
		if pids[role] != pid {
			t.Errorf("%s was restarted", role)
		}
	}
	eventually(t, "no descriptor is left", func() bool { return descriptors(t, pids["frontend-nbd"]) <= before })
	eventually(t, "nobody has the device open", func() bool {
		d, err := r.client.Device(r.device.Name)
		return err == nil && d.Openers == 0 && d.Inflight == 0
	})
	if err := r.client.Unmap(r.device.Name, false); err != nil {
		t.Errorf("unmap: %v", err)
	}
}
