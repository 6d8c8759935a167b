package gso

import (
	"bytes"
	"testing"
)

// segmentsOf are the segments of a packet with n bytes of payload, of size bytes.
func segmentsOf(t testing.TB, v6 bool, n, size int, flags byte) (out [][]byte) {
	t.Helper()
	if err := TCP(tcpPacket(v6, n, flags), size, fresh, func(s []byte) { out = append(out, s) }); err != nil {
		t.Fatal(err)
	}
	return out
}

// TestIP23_Join: packets are joined, and segmenting the joined packet gives
// them again.
func TestIP23_Join(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		for _, flags := range []byte{flagACK, flagACK | flagPSH} {
			want := segmentsOf(t, v6, 10500, 1000, flags)
			j := NewJoiner(10)
			for _, s := range want {
				if !j.Add(s) {
					t.Fatal("a segment was not joined")
				}
			}
			out := j.Take()
			if out.Count != 11 || out.Size != 1000 || out.V6 != v6 {
				t.Errorf("joined %d of %d bytes", out.Count, out.Size)
			}
			var got [][]byte
			if err := TCP(out.Packet[10:], out.Size, fresh, func(s []byte) { got = append(got, s) }); err != nil {
				t.Fatal(err)
			}
			for k, s := range got {
				if !bytes.Equal(s, want[k]) || !checksums(s) {
					t.Fatalf("segment %d is another one", k)
				}
			}
			if j.Take().Count != 0 {
				t.Error("something is left")
			}
		}
	}
}

// TestIP23_NotJoined: a packet that a joined packet could not represent is not
// joined.
func TestIP23_NotJoined(t *testing.T) {
	sealed := func(b []byte, edit func(b []byte)) []byte {
		b = bytes.Clone(b)
		edit(b)
		p, err := parseTCP(b)
		if err != nil {
			return b
		}
		p.finishSegment(b, be.Uint16(b[4:]))
		return b
	}
	for _, v6 := range []bool{false, true} {
		s := segmentsOf(t, v6, 3000, 1000, flagACK)
		ip := 20
		if v6 {
			ip = 40
		}
		for name, edit := range map[string]func(b []byte){
			"another port":           func(b []byte) { b[ip+1]++ },
			"a gap":                  func(b []byte) { b[ip+7]++ },
			"another acknowledgment": func(b []byte) { b[ip+11]++ },
			"another window":         func(b []byte) { b[ip+15]++ },
			"other options":          func(b []byte) { b[ip+20]++ },
			"FIN":                    func(b []byte) { b[ip+13] |= flagFIN },
			"CWR":                    func(b []byte) { b[ip+13] |= flagCWR },
			"another traffic class":  func(b []byte) { b[1] ^= 0x10 },
		} {
			j := NewJoiner(0)
			if !j.Add(s[0]) || j.Add(sealed(s[1], edit)) {
				t.Errorf("v6 %t: %s was joined", v6, name)
			}
			if out := j.Take(); out.Count != 1 || !bytes.Equal(out.Packet, s[0]) {
				t.Errorf("v6 %t: %s: the first packet has changed", v6, name)
			}
		}
		j := NewJoiner(0)
		wrong := bytes.Clone(s[0])
		wrong[len(wrong)-1]++
		if j.Add(wrong) {
			t.Error("a packet with a wrong checksum was taken")
		}
		if !j.Add(s[0]) || j.Add(s[0]) {
			t.Error("the same sequence number was joined")
		}
	}
	j := NewJoiner(0)
	short := segmentsOf(t, false, 1500, 1000, flagACK)
	if !j.Add(short[0]) || !j.Add(short[1]) || j.Add(sealed(short[0], func(b []byte) {})) {
		t.Error("something was joined behind a short packet")
	}
}

func FuzzJoin(f *testing.F) {
	for _, v6 := range []bool{false, true} {
		s := segmentsOf(f, v6, 200, 100, flagACK)
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, a, b []byte) {
		j := NewJoiner(4)
		n := 0
		for _, p := range [][]byte{a, b, a} {
			if j.Add(p) {
				n++
			}
		}
		if out := j.Take(); out.Count != n || len(out.Packet) > 4+maxPacket {
			t.Errorf("joined %+v of %d", out, n)
		}
	})
}
