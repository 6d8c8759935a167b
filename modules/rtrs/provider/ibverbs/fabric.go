//go:build linux && cgo && ibverbs

package ibverbs

// #include "lib.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Built reports whether this program has the fabric.
const Built = true

// Fabric is all RDMA devices of the host.
type Fabric struct {
	cfg Config

	mu      sync.Mutex
	channel *cChannel // nil: nothing was asked of us yet
	wakefd  int
	closed  bool
	done    chan struct{} // closed when run has ended
	ids     map[uint64]*cmID
	handles uint64
	lists   map[*listener]struct{}

	scan    sync.Mutex // one search for devices at a time; taken before mu
	devices map[*cContext]*Device
}

// Open returns the fabric. Libraries and devices are looked for when they are
// first needed.
func Open(cfg Config) *Fabric {
	return &Fabric{cfg: cfg.withDefaults(), ids: map[uint64]*cmID{}, lists: map[*listener]struct{}{}, devices: map[*cContext]*Device{}}
}

var errChooser = fmt.Errorf("the fabric has several devices, this needs one: %w", verbs.ErrUnsupported)

// AllocPD fails: use a device.
func (f *Fabric) AllocPD() (verbs.PD, error) { return nil, errChooser }

// CreateCQ fails: use a device.
func (f *Fabric) CreateCQ(int) (verbs.CQ, error) { return nil, errChooser }

// CreateQP fails: use a device.
func (f *Fabric) CreateQP(verbs.PD, verbs.QPConfig) (verbs.QP, error) { return nil, errChooser }

// Connect fails: use a device.
func (f *Fabric) Connect(context.Context, verbs.QP, verbs.ConnectParams) ([]byte, error) {
	return nil, errChooser
}

// openChannel opens the libraries and the channel of the connection manager.
func (f *Fabric) openChannel() error {
	if said := C.rv_load(); said != nil {
		return libraryError(C.GoString(said))
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed:
		return verbs.ErrClosed
	case f.channel != nil:
		return nil
	}
	var ch *cChannel
	if err := errnoOf(C.rv_create_channel(&ch)); err != nil {
		if errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ENOENT) {
			return noDevice()
		}
		return fmt.Errorf("open the RDMA connection manager (/dev/infiniband/rdma_cm): %w", err)
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return fmt.Errorf("open the RDMA connection manager: eventfd: %w", err)
	}
	f.channel, f.wakefd, f.done = ch, fd, make(chan struct{})
	go f.run(ch)
	return nil
}

// wakeRun lets run look at its descriptors again.
func (f *Fabric) wakeRun() { unix.Write(f.wakefd, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

// Devices returns the RDMA devices of the host.
func (f *Fabric) Devices() ([]*Device, error) {
	if err := f.openChannel(); err != nil {
		return nil, err
	}
	if err := f.refreshDevices(); err != nil {
		return nil, err
	}
	var list []*Device
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.devices {
		list = append(list, d)
	}
	return list, nil
}

// refreshDevices looks for devices that are new.
func (f *Fabric) refreshDevices() error {
	f.scan.Lock()
	defer f.scan.Unlock()
	var found [64]C.struct_rv_device
	var n C.int
	if err := errnoOf(C.rv_devices(&found[0], C.int(len(found)), &n)); err != nil {
		return noDevice()
	}
	for i := range found[:n] {
		f.mu.Lock()
		known := f.devices[found[i].ctx] != nil
		f.mu.Unlock()
		if known {
			continue
		}
		d := newDevice(f, &found[i])
		f.mu.Lock()
		f.devices[d.ctx] = d
		f.mu.Unlock()
		f.wakeRun()
	}
	if n == 0 {
		return noDevice()
	}
	return nil
}

// deviceOf returns the device of a context of librdmacm's.
func (f *Fabric) deviceOf(ctx *cContext) (*Device, error) {
	if ctx == nil {
		return nil, ErrNoDevice
	}
	for range 2 {
		f.mu.Lock()
		d := f.devices[ctx]
		f.mu.Unlock()
		if d != nil {
			return d, nil
		}
		if err := f.refreshDevices(); err != nil {
			return nil, err
		}
	}
	return nil, ErrNoDevice
}

// resolveTimeout bounds the search for the neighbour that leads to an address.
const resolveTimeout = 2 * time.Second

// DeviceFor implements verbs.Chooser. The error is ErrNoDevice where no device
// leads to dst.
func (f *Fabric) DeviceFor(ctx context.Context, src, dst netip.Addr) (verbs.Device, error) {
	d, err := f.deviceFor(ctx, src, dst)
	if err != nil {
		return nil, fmt.Errorf("find the RDMA device for %s: %w", verbs.AddrString(dst), err)
	}
	return d, nil
}

func (f *Fabric) deviceFor(ctx context.Context, src, dst netip.Addr) (*Device, error) {
	if err := f.openChannel(); err != nil {
		return nil, err
	}
	w := eventWaiter(make(chan cmEventCopy, 4))
	id, err := f.boundID(ctx, w, w, src, netip.AddrPortFrom(dst, 1))
	if err != nil {
		return nil, err
	}
	defer id.destroyID()
	return f.deviceOf(C.rv_id_context(id.id))
}

// Close ends the listeners. Devices stay usable until their queues are closed.
func (f *Fabric) Close() error {
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return nil
	}
	f.closed = true
	var lists []*listener
	for l := range f.lists {
		lists = append(lists, l)
	}
	f.mu.Unlock()
	for _, l := range lists {
		l.Close()
	}
	return nil
}
