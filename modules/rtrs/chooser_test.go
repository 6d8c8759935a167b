package rtrs

import (
	"context"
	"errors"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// chooser is a fabric of two devices on one network.
type chooser struct {
	verbs.Device // must not be used but for Info and Listen
	use          atomic.Pointer[verbs.Device]
	err          atomic.Pointer[error]
}

func (c *chooser) choose(d verbs.Device) { c.use.Store(&d) }

func (c *chooser) AllocPD() (verbs.PD, error) { return nil, errors.New("not of the whole fabric") }

func (c *chooser) DeviceFor(context.Context, netip.Addr, netip.Addr) (verbs.Device, error) {
	if err := c.err.Load(); err != nil {
		return nil, *err
	}
	return *c.use.Load(), nil
}

// A path asks its fabric at each attempt for the device that leads to the
// server.
func TestPathAsksTheFabricForItsDevice(t *testing.T) {
	net := loopback.New()
	d, _ := serveDisk(t, net)
	fabric := &chooser{Device: net.Device("fabric")}
	fabric.choose(net.Device("one"))
	c := &cltWriter{cltClient: cltOpen(t, []PathAddr{pathTo(fabric, cltA, srvA)}, nil)}
	c.start(1)
	c.finished(1, 0)
	if n := len(c.Session.devices); n != 1 || c.Session.devices[0].dev != *fabric.use.Load() {
		t.Errorf("the session has %d devices, not the chosen one", n)
	}

	if got := c.Paths()[0].Device; got != "one" {
		t.Errorf("the path says it is on %q", got)
	}

	fabric.choose(net.Device("two"))
	net.Cut(cltA, addrOf(srvA))
	c.awaitState(1, PathReconnecting)
	c.awaitState(1, PathConnected)
	c.start(2)
	c.finished(2, 0)
	if v := d.version(0); v != 2 {
		t.Errorf("version %d", v)
	}
	if got := c.Paths()[0].Device; got != "two" {
		t.Errorf("after the reconnect the path says it is on %q", got)
	}
	if n := len(c.Session.devices); n != 2 || c.Session.devices[1].dev != *fabric.use.Load() {
		t.Errorf("the session has %d devices, the new one is not the last", n)
	}
}

func TestPathWithoutADeviceSaysWhy(t *testing.T) {
	fabric := &chooser{Device: loopback.New().Device("fabric")}
	for says, want := range map[error]syscall.Errno{
		syscall.ENETUNREACH: syscall.EHOSTUNREACH, syscall.ENODEV: syscall.ENODEV, verbs.ErrUnsupported: syscall.EOPNOTSUPP,
	} {
		fabric.err.Store(&says)
		_, cfg := cltConfig(t, 1)
		s, err := Open(cltContext(t), "s", []PathAddr{pathTo(fabric, cltA, srvA)}, cfg)
		if err == nil {
			s.Close(cltContext(t))
		}
		if !errors.Is(err, want) || ErrnoOf(err) != int(want) {
			t.Errorf("%v, want %v", err, want)
		}
	}
}

// deviceListener hands out requests that came to one device of a fabric.
type deviceListener struct {
	verbs.Listener
	dev verbs.Device
}

type deviceRequest struct {
	verbs.ConnRequest
	dev verbs.Device
}

func (r deviceRequest) Device() verbs.Device { return r.dev }

func (l deviceListener) Accept() (verbs.ConnRequest, error) {
	r, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return deviceRequest{r, l.dev}, nil
}

// wholeFabric listens for dev.
type wholeFabric struct {
	chooser
	dev verbs.Device
}

func (f *wholeFabric) Listen(addr netip.AddrPort) (verbs.Listener, error) {
	l, err := f.dev.Listen(addr)
	return deviceListener{l, f.dev}, err
}

func TestServerTakesThePathsDeviceFromTheRequest(t *testing.T) {
	net := loopback.New()
	_, srv := serveDisk(t, net)
	f := &wholeFabric{dev: net.Device("behind")}
	f.Device = net.Device("fabric")
	at := netip.MustParseAddrPort("10.7.7.7:4321")
	if _, err := srv.Listen(f, at); err != nil {
		t.Fatal(err)
	}
	c := &cltWriter{cltClient: cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, at.String())}, nil)}
	c.start(1)
	c.finished(1, 0)
	if got := srv.Sessions()[0].Paths()[0].Device; got != "behind" {
		t.Errorf("the path is on %q", got)
	}
}
