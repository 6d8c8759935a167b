//go:build linux && cgo && ibverbs

package ibverbs

import (
	"crypto/rand"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs/verbstest"
)

// These tests need an RDMA device. Software ones do: test/kernelvm runs them in
// a guest that has them.

// addresses of the first RDMA device of the host.
func addresses(t testing.TB) (v4, v6 netip.Addr) {
	t.Helper()
	files, _ := filepath.Glob("/sys/class/infiniband/*/ports/1/gid_attrs/ndevs/0")
	if len(files) == 0 {
		t.Skip("no RDMA device here: test/kernelvm runs this in a guest")
	}
	name, err := os.ReadFile(files[0])
	check(t, err)
	ifi, err := net.InterfaceByName(strings.TrimSpace(string(name)))
	check(t, err)
	addrs, err := ifi.Addrs()
	check(t, err)
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		check(t, err)
		switch addr := p.Addr(); {
		case addr.Is4() && !v4.IsValid():
			v4 = addr
		case addr.Is6() && !addr.IsLinkLocalUnicast() && !v6.IsValid():
			v6 = addr
		}
	}
	if !v4.IsValid() {
		t.Skipf("RDMA device %s has no IPv4 address", files[0])
	}
	return v4, v6
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func openFabric(t testing.TB, cfg Config) *Fabric {
	t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	if os.Getenv("IBVERBS_LOG") != "" {
		cfg.Logger = slog.Default()
	}
	f := Open(cfg)
	t.Cleanup(func() { f.Close() })
	return f
}

// shared is the fabric of all cases: devices are found and tried once.
var shared *Fabric

func deviceAt(t testing.TB, addr netip.Addr) verbs.Device {
	t.Helper()
	if shared == nil {
		shared = Open(Config{Logger: slog.New(slog.DiscardHandler)})
	}
	d, err := shared.DeviceFor(t.Context(), addr, addr)
	check(t, err)
	return d
}

// garbage sends noise to the UDP port of RoCEv2. Where the device does not use
// it, nobody minds.
func garbage(t *testing.T, addr netip.AddrPort) {
	c, err := net.Dial("udp", netip.AddrPortFrom(addr.Addr(), 4791).String())
	check(t, err)
	defer c.Close()
	noise := make([]byte, 280)
	rand.Read(noise)
	for _, b := range [][]byte{noise, noise[:20], {1, 2, 3}} {
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
	}
}

func TestConformance(t *testing.T) {
	v4, v6 := addresses(t)
	verbstest.Patience = 30 * time.Second // the guest of test/kernelvm is emulated
	verbstest.Run(t, func(t *testing.T) verbstest.Fabric {
		d := deviceAt(t, v4)
		f := verbstest.Fabric{Client: d, Server: d, Addr: netip.AddrPortFrom(v4, 0), Garbage: garbage,
			OwnGIDs: !overEthernet(t, d.Info().Name), VagueErrors: strings.HasPrefix(d.Info().Name, "rxe")}
		if v6.IsValid() {
			f.Addr6 = netip.AddrPortFrom(v6, 0)
		}
		return f
	})
}

// The probe finds rxe's windows; elsewhere it says why not.
func TestDeviceTellsWhetherItRotatesKeys(t *testing.T) {
	v4, _ := addresses(t)
	d := deviceAt(t, v4)
	info := d.Info()
	if strings.HasPrefix(info.Name, "rxe") && info.Caps&verbs.CapKeyRotation == 0 {
		t.Errorf("%s has memory windows of type 1, but its abilities are %#x", info.Name, info.Caps)
	}
	if info.Fabric != "ibverbs" || info.Name == "" || info.MaxQPWR < 1024 || info.MaxSGE < 2 {
		t.Errorf("the device says %+v", info)
	}
}
