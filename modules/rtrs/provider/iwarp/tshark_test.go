package iwarp

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// tap is a TCP proxy that records the passing bytes, in order.
type tap struct {
	addr netip.AddrPort

	mu    sync.Mutex
	parts []tapPart
	done  sync.WaitGroup
}

type tapPart struct {
	dir  int
	data []byte
}

func newTap(t *testing.T, to netip.AddrPort) *tap {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &tap{addr: addrPort(l.Addr())}
	p.done.Go(func() {
		defer l.Close()
		client, err := l.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", to.String())
		if err != nil {
			client.Close()
			return
		}
		p.done.Go(func() { p.copy(server, client, toServer) })
		p.copy(client, server, toClient)
	})
	return p
}

func (p *tap) copy(to, from net.Conn, dir int) {
	defer to.Close()
	for b := make([]byte, 40000); ; {
		n, err := from.Read(b)
		p.mu.Lock()
		p.parts = append(p.parts, tapPart{dir, bytes.Clone(b[:n])})
		p.mu.Unlock()
		to.Write(b[:n])
		if err != nil {
			return
		}
	}
}

// pcap returns the recorded bytes as a capture of IPv4 over Ethernet.
func (p *tap) pcap() []byte {
	out := binary.LittleEndian.AppendUint32(nil, 0xa1b2c3d4)
	out = append(out, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 1, 0, 0, 0)
	seq := [2]uint32{1000, 5000}
	usec := uint32(0)
	put := func(dir int, flags byte, data []byte) {
		usec++
		f := make([]byte, 54, 54+len(data))
		f[12] = 8
		ip, tcp := f[14:34], f[34:54]
		ip[0], ip[8], ip[9] = 0x45, 64, 6
		binary.BigEndian.PutUint16(ip[2:], uint16(40+len(data)))
		ports := [2]uint16{45000, 1234}
		copy(ip[12:], []byte{10, 0, 0, byte(1 + dir), 10, 0, 0, byte(2 - dir)})
		binary.BigEndian.PutUint16(tcp, ports[dir])
		binary.BigEndian.PutUint16(tcp[2:], ports[1-dir])
		binary.BigEndian.PutUint32(tcp[4:], seq[dir])
		binary.BigEndian.PutUint32(tcp[8:], seq[1-dir])
		tcp[12], tcp[13] = 5<<4, flags
		binary.BigEndian.PutUint16(tcp[14:], 65535)
		f = append(f, data...)
		seq[dir] += uint32(len(data)) + uint32(flags>>1&1)
		for _, v := range []uint32{1, usec, uint32(len(f)), uint32(len(f))} {
			out = binary.LittleEndian.AppendUint32(out, v)
		}
		out = append(out, f...)
	}
	put(toServer, 0x02, nil)
	put(toClient, 0x12, nil)
	put(toServer, 0x10, nil)
	for _, part := range p.parts {
		if len(part.data) > 0 {
			put(part.dir, 0x18, part.data)
		}
	}
	return out
}

// allTraffic moves one message of every kind both ways over a tap.
func allTraffic(t *testing.T, cfg Config) *tap {
	c, s := newEnd(t, cfg), newEnd(t, cfg)
	l := listen(t, s.dev)
	p := newTap(t, l.Addr())
	done := acceptOne(t, l, s.qp)
	if _, err := c.dev.Connect(context.Background(), c.qp, verbs.ConnectParams{Dst: p.addr, Private: make([]byte, 56)}); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	cbuf, cmr := c.region(200000, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
	sbuf, smr := s.region(200000, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
	_, inv := s.region(8, verbs.AccessRemoteWrite)
	for range 4 {
		s.recv(verbs.RecvWR{Buf: sbuf[:100000], LKey: smr.LKey()})
		c.recv(verbs.RecvWR{Buf: cbuf[100000:], LKey: cmr.LKey()})
	}
	sge := func(n int) []verbs.SGE { return []verbs.SGE{{Buf: cbuf[:n], LKey: cmr.LKey()}} }
	c.send(
		verbs.SendWR{Op: verbs.OpSend, SGEs: sge(1001)},
		verbs.SendWR{Op: verbs.OpSendImm, Imm: 7, SGEs: sge(8)},
		verbs.SendWR{Op: verbs.OpSendInv, RKey: inv.RKey(), SGEs: sge(90000)},
		verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: smr.Addr(), RKey: smr.RKey(), SGEs: sge(70001)},
		verbs.SendWR{Op: verbs.OpWriteImm, Imm: 9, RemoteAddr: smr.Addr(), RKey: smr.RKey(), SGEs: sge(4096)},
		verbs.SendWR{Op: verbs.OpRead, Signaled: true, RemoteAddr: smr.Addr(), RKey: smr.RKey(), SGEs: sge(100000)})
	for range 4 {
		if wc := s.next(c); wc.Status != verbs.StatusOK {
			t.Fatalf("%+v", wc)
		}
	}
	if wc := c.next(s); wc.Op != verbs.OpRead || wc.Status != verbs.StatusOK {
		t.Fatalf("%+v", wc)
	}
	s.send(verbs.SendWR{Op: verbs.OpWriteImm, Imm: 1})
	c.next(s)
	c.send(verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: 1, RKey: smr.RKey(), SGEs: sge(13)}) // brings a Terminate
	s.ended(c)
	c.ended()
	p.done.Wait()
	return p
}

// Another decoder reads our traffic. tshark knows neither Immediate Data nor
// opcode F as messages, but its framing and its CRCs cover them.
func TestTsharkDecodesOurTraffic(t *testing.T) {
	tshark, err := exec.LookPath("tshark")
	if err != nil {
		t.Skip("no tshark here: ", err)
	}
	for _, cfg := range []Config{DefaultConfig(), {CRC: true, MULPDU: 1436}, {}} {
		p := allTraffic(t, cfg)
		file := filepath.Join(t.TempDir(), "own.pcap")
		if err := os.WriteFile(file, p.pcap(), 0o600); err != nil {
			t.Fatal(err)
		}
		checkTshark(t, tshark, file, cfg.CRC)
	}
}

func checkTshark(t *testing.T, tshark, file string, crc bool) {
	cmd := exec.Command(tshark, "-r", file, "-V", "-O", "iwarp_mpa,iwarp_ddp_rdmap")
	cmd.Env = append(os.Environ(), "HOME="+t.TempDir())
	cmd.Stderr = io.Discard
	b, err := cmd.Output()
	if err != nil {
		t.Fatalf("tshark: %v", err)
	}
	out := string(b)
	conv, ok := readCapture(t, file).streams[0].conversation()
	if !ok {
		t.Fatal("our own capture has no start-up")
	}
	all := append(frames(conv.fpdus[toServer]), frames(conv.fpdus[toClient])...)
	ops := map[opcode]int{}
	for _, f := range all {
		ops[fpduHeader(f).op()]++
	}
	if n := strings.Count(out, "ULPDU length"); n != len(all) {
		t.Errorf("tshark sees %d frames, we sent %d", n, len(all))
	}
	for op, name := range map[opcode]string{
		opWrite: "OpCode: Write", opReadRequest: "OpCode: Read Request", opReadResponse: "OpCode: Read Response",
		opSend: "OpCode: Send (", opSendInv: "OpCode: Send with Invalidate", opTerminate: "OpCode: Terminate",
	} {
		if n := strings.Count(out, name); n != ops[op] || n == 0 {
			t.Errorf("tshark sees %d times %q, we sent %d", n, name, ops[op])
		}
	}
	good := strings.Count(out, "Good CRC32")
	if crc && good != len(all) || strings.Contains(out, "Bad CRC") {
		t.Errorf("tshark finds %d of %d CRCs good", good, len(all))
	}
	if strings.Contains(out, "Malformed") {
		t.Error("tshark finds malformed frames")
	}
}
