//go:build linux && cgo && ibverbs

package ibverbs

// #include "lib.h"
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Device is one RDMA device.
type Device struct {
	f      *Fabric
	ctx    *cContext
	info   verbs.Info
	maxCQE int
	// software: the kernel imitates the device.
	software bool
	lost     atomic.Bool // it was removed, or is broken

	mu  sync.Mutex
	qps map[uint32]*qp // by number, those that the library has
}

var _ verbs.Device = (*Device)(nil)

// maxSGE is how many elements a request of ours has at most.
const maxSGE = 16

// newDevice describes a device and reads its capabilities.
func newDevice(f *Fabric, c *C.struct_rv_device) *Device {
	d := &Device{f: f, ctx: c.ctx, maxCQE: int(c.max_cqe), qps: map[uint32]*qp{}}
	d.info = verbs.Info{
		Fabric: "ibverbs", Name: C.GoString(&c.name[0]), Port: 1,
		MaxQPWR: int(c.max_qp_wr), MaxSGE: min(int(c.max_sge), maxSGE),
	}
	if link, err := os.Readlink("/sys/class/infiniband/" + d.info.Name); err == nil {
		d.software = strings.Contains(link, "/virtual/")
	}
	if c.iwarp == 0 { // iWARP has no immediates
		d.info.Caps = verbs.CapWriteImm | verbs.CapSendImm
	}
	if c.send_inv != 0 {
		d.info.Caps |= verbs.CapSendInv
	}
	why := "it has no memory windows of type 1"
	if c.windows != 0 {
		why = ""
		if w := C.rv_probe(d.ctx); w != nil {
			why = C.GoString(w)
		}
	}
	if why == "" {
		d.info.Caps |= verbs.CapKeyRotation
		f.cfg.Logger.Info("ibverbs: device opened", "device", d.info.Name, "always_invalidate", "by memory windows of type 1")
	} else {
		f.cfg.Logger.Warn("ibverbs: device opened; as a server it cannot change keys after each I/O (always_invalidate), its sessions keep one key",
			"device", d.info.Name, "cause", why)
	}
	return d
}

// Info implements verbs.Device.
func (d *Device) Info() verbs.Info { return d.info }

// Listen implements verbs.Device. It is the fabric's: of a wildcard address it
// takes the requests to every device.
func (d *Device) Listen(addr netip.AddrPort) (verbs.Listener, error) { return d.f.Listen(addr) }

// Close does nothing: devices belong to the fabric.
func (d *Device) Close() error { return nil }

// checkContext returns an error unless an identifier that was bound to ctx
// belongs to this device.
func (d *Device) checkContext(ctx *cContext) error {
	if ctx == d.ctx {
		return nil
	}
	return fmt.Errorf("the way there has moved to another device: %w", syscall.ENETUNREACH)
}

// asyncEvents handles the device's asynchronous events.
func (d *Device) asyncEvents() {
	for {
		var kind C.int
		var num C.uint32_t
		err := errnoOf(C.rv_async(d.ctx, &kind, &num))
		if errors.Is(err, syscall.EAGAIN) {
			return
		}
		if err != nil {
			d.endAll(err.Error())
			return
		}
		switch {
		case num != 0:
			d.mu.Lock()
			q := d.qps[uint32(num)]
			d.mu.Unlock()
			if q != nil {
				q.Disconnect()
			}
		case kind == C.IBV_EVENT_DEVICE_FATAL:
			d.endAll(C.GoString(C.rv_async_str(kind)))
			return
		}
	}
}

// endAll ends all connections of a device that is gone.
func (d *Device) endAll(why string) {
	if d.lost.Swap(true) {
		return
	}
	d.f.cfg.Logger.Error("ibverbs: device lost", "device", d.info.Name, "cause", why)
	d.mu.Lock()
	for _, q := range d.qps {
		q.Disconnect()
	}
	d.mu.Unlock()
	d.f.wakeRun()
}

// addQP makes q known to asyncEvents.
func (d *Device) addQP(num uint32, q *qp) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.qps[num] = q
}

func (d *Device) removeQP(num uint32) {
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.qps, num)
}

// CreateQP implements verbs.Device.
func (d *Device) CreateQP(v verbs.PD, cfg verbs.QPConfig) (verbs.QP, error) {
	p, ok := v.(*pd)
	c, ok2 := cfg.CQ.(*compQueue)
	switch {
	case !ok || !ok2 || p.dev != d || c.dev != d:
		return nil, fmt.Errorf("create queue pair on %s: %w", d.info.Name, errNotOurs)
	case cfg.SendQueue < 1 || cfg.RecvQueue < 1 || max(cfg.SendQueue, cfg.RecvQueue) > d.info.MaxQPWR:
		return nil, fmt.Errorf("create queue pair on %s: queues of %d and %d, they may have 1 to %d", d.info.Name, cfg.SendQueue, cfg.RecvQueue, d.info.MaxQPWR)
	case cfg.MaxSGE < 1 || cfg.MaxSGE > d.info.MaxSGE:
		return nil, fmt.Errorf("create queue pair on %s: %d elements, 1 to %d are possible", d.info.Name, cfg.MaxSGE, d.info.MaxSGE)
	}
	q := newQP(d, p, c, cfg)
	if err := c.addQP(q); err != nil {
		return nil, fmt.Errorf("create queue pair on %s: %w", d.info.Name, err)
	}
	return q, nil
}

var errNotOurs = errors.New("belongs to another device")

// Connect implements verbs.Device.
func (d *Device) Connect(ctx context.Context, v verbs.QP, p verbs.ConnectParams) ([]byte, error) {
	q, ok := v.(*qp)
	if !ok || q.dev != d {
		return nil, fmt.Errorf("connect to %s: %w", verbs.AddrPortString(p.Dst), errNotOurs)
	}
	private, err := q.connectQP(ctx, p)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", verbs.AddrPortString(p.Dst), err)
	}
	return private, nil
}
