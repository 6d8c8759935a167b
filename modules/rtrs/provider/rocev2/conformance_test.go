package rocev2

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs/verbstest"
)

var (
	addrA = testAddr(1)
	addrB = testAddr(2)
	addr6 = netip.MustParseAddr("::1")
)

// testAddr is the n-th loopback address of this process: the port is always the
// same, so two runs of these tests need addresses of their own.
func testAddr(n byte) netip.Addr {
	pid := os.Getpid()
	return netip.AddrFrom4([4]byte{127, 64 | byte(pid>>8)&0x3f, byte(pid), n})
}

func openDevice(t testing.TB, cfg Config) *Device {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	if os.Getenv("ROCEV2_LOG") != "" {
		cfg.Logger = slog.Default()
	}
	d, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d.(*Device)
}

// Every provider runs the suite of the seam: between two devices with an
// address each, and within one device without offloads and with small packets,
// where IPv6 needs one address only.
func TestConformance(t *testing.T) {
	t.Run("two devices", func(t *testing.T) { verbstest.Run(t, twoDevices) })
	t.Run("one device, path MTU 1024, no offloads", func(t *testing.T) { verbstest.Run(t, oneDevice) })
}

func twoDevices(t *testing.T) verbstest.Fabric {
	return verbstest.Fabric{
		Client: openDevice(t, Config{Addrs: []netip.Addr{addrA}}),
		Server: openDevice(t, Config{Addrs: []netip.Addr{addrB}}),
		Addr:   netip.AddrPortFrom(addrB, 0), Src: addrA, Garbage: garbage,
	}
}

func oneDevice(t *testing.T) verbstest.Fabric {
	cfg := Config{Addrs: []netip.Addr{addrA, addrB}, PathMTU: 1024, NoOffload: true}
	f := verbstest.Fabric{Addr: netip.AddrPortFrom(addrB, 0), Garbage: garbage}
	if strings.Contains(t.Name(), "IPv6") && waitIPv6(t) {
		cfg.Addrs = append(cfg.Addrs, addr6)
		f.Addr6 = netip.AddrPortFrom(addr6, 0)
	}
	d := openDevice(t, cfg)
	f.Client, f.Server = d, d
	return f
}

// waitIPv6 reports whether this host has ::1, and waits until no other run of
// these tests uses our port there. The lock is held until the test ends.
func waitIPv6(t *testing.T) bool {
	t.Helper()
	c, err := net.ListenPacket("udp", "[::1]:0")
	if err != nil {
		return false
	}
	c.Close()
	lock := must(os.OpenFile(filepath.Join(os.TempDir(), "rocev2-test-ipv6.lock"), os.O_CREATE|os.O_RDWR, 0o666))(t)
	t.Cleanup(func() { lock.Close() })
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	return true
}

// garbage sends a port datagrams that are no message: noise, nothing, half a
// message, and a REQ with a wrong ICRC.
func garbage(t *testing.T, addr netip.AddrPort) {
	c, err := (&net.Dialer{}).DialContext(context.Background(), "udp", netip.AddrPortFrom(addr.Addr(), roceUDPPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	noise := make([]byte, 280)
	rand.Read(noise)
	f := reqFields{id: 1, service: servicePortSpace | uint64(addr.Port()), guid: 5, qpn: 17, mtu: 3, source: addrA, dest: addr.Addr()}
	req := make([]byte, cmPacketLen)
	putDatagram(req, f.encode(1), 0)
	for _, b := range [][]byte{noise, {}, {1, 2, 3}, req[:100], req} {
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(time.Millisecond)
}
