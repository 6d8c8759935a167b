package iwarp

import (
	"crypto/rand"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs/verbstest"
)

// Every provider runs the suite of the seam; here over 127.0.0.1 and ::1, with
// CRC and large frames, without CRC and with frames so small that most
// messages are segmented, and as with a foreign peer, without immediates.
func TestConformance(t *testing.T) {
	verbstest.Patience = 10 * time.Second
	configs := map[string]Config{
		"default":                   DefaultConfig(),
		"small frames, without CRC": {MULPDU: 1436},
		"foreign":                   {CRC: true, Foreign: true},
	}
	for name, cfg := range configs {
		t.Run(name, func(t *testing.T) {
			verbstest.Run(t, func(t *testing.T) verbstest.Fabric { return fabric(t, cfg) })
		})
	}
}

// A peer that goes while it is not read from is noticed only when its message has
// waited in vain: that is before the suite's patience ends.
func fabric(t *testing.T, cfg Config) verbstest.Fabric {
	cfg.RNRTimeout = 4 * time.Second
	f := verbstest.Fabric{
		Client:  openDevice(t, cfg),
		Server:  openDevice(t, cfg),
		Addr:    netip.MustParseAddrPort("127.0.0.1:0"),
		Garbage: garbage,
	}
	if l, err := net.Listen("tcp", "[::1]:0"); err == nil {
		l.Close()
		f.Addr6 = netip.MustParseAddrPort("[::1]:0")
	}
	return f
}

// garbage sends a listener bytes that are no request: noise, nothing, half a
// request, the wrong key.
func garbage(t *testing.T, addr netip.AddrPort) {
	noise := make([]byte, 4096)
	rand.Read(noise)
	frame := mpaFrame{flags: mpaEnhanced, rev: 2, private: make([]byte, 4)}
	for _, b := range [][]byte{noise, nil, frame.encode(mpaKeyRequest)[:17], frame.encode(mpaKeyReply), []byte("GET / HTTP/1.0\r\n\r\n------")} {
		conn, err := net.DialTimeout("tcp", addr.String(), time.Second)
		if err != nil {
			t.Fatal(err)
		}
		conn.Write(b)
		conn.Close()
	}
}
