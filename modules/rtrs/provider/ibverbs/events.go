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
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// cmEventCopy is one of the connection manager, copied.
type cmEventCopy struct {
	kind    C.int // enum rdma_cm_event_type
	status  int
	id      *cID // of a connection request
	private []byte
}

// eventSink takes the events of an id, on the goroutine that reads them: it must
// not block.
type eventSink interface{ cmEvent(cmEventCopy) }

// eventWaiter hands events to whoever waits for them.
type eventWaiter chan cmEventCopy

func (w eventWaiter) cmEvent(e cmEventCopy) {
	select {
	case w <- e:
	default: // no receiver waits for that many
	}
}

// cmID is one communication identifier of librdmacm.
type cmID struct {
	f      *Fabric
	id     *cID
	handle uint64
	sink   eventSink // guarded by Fabric.mu
}

// newID makes an identifier for addresses of addr's family.
func (f *Fabric) newID(s eventSink, addr netip.Addr) (*cmID, error) {
	i := f.createID(s)
	family := toC(netip.AddrPortFrom(addr, 0)).family
	if err := errnoOf(C.rv_create_id(f.channel, C.uint64_t(i.handle), family, &i.id)); err != nil {
		f.removeID(i)
		return nil, fmt.Errorf("make a connection identifier: %w", err)
	}
	return i, nil
}

// adoptID makes an identifier of the one that came with a request.
func (f *Fabric) adoptID(id *cID, s eventSink) *cmID {
	i := f.createID(s)
	i.id = id
	C.rv_adopt_id(id, C.uint64_t(i.handle))
	return i
}

func (f *Fabric) createID(s eventSink) *cmID {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.handles++
	i := &cmID{f: f, handle: f.handles, sink: s}
	f.ids[i.handle] = i
	return i
}

func (f *Fabric) removeID(i *cmID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.ids, i.handle)
}

// setSink gives later events to s.
func (i *cmID) setSink(s eventSink) {
	i.f.mu.Lock()
	defer i.f.mu.Unlock()
	i.sink = s
}

// destroyID frees the identifier and its queue pair.
func (i *cmID) destroyID() {
	i.f.removeID(i)
	C.rv_destroy_id(i.id)
}

func (i *cmID) localAddr() netip.AddrPort {
	var a C.struct_rv_addr
	C.rv_local_addr(i.id, &a)
	return fromC(&a)
}

func (i *cmID) remoteAddr() netip.AddrPort {
	var a C.struct_rv_addr
	C.rv_remote_addr(i.id, &a)
	return fromC(&a)
}

// boundID returns an identifier that is bound to the device that leads from src to
// dst. Over Ethernet Linux finds no route for a GID (ENODEV): there its IP address
// is taken.
func (f *Fabric) boundID(ctx context.Context, s eventSink, w eventWaiter, src netip.Addr, dst netip.AddrPort) (*cmID, error) {
	id, err := f.resolveAddr(ctx, s, w, src, dst)
	if !verbs.IsGID(dst.Addr()) || err == nil && id.linkLayer() == "InfiniBand" {
		return id, err
	}
	if err == nil {
		id.destroyID()
	}
	p, ipErr := verbs.ConnectParams{Src: src, Dst: dst}.IP()
	if ipErr == nil {
		id, ipErr = f.resolveAddr(ctx, s, w, p.Src, p.Dst)
	}
	if err != nil && ipErr != nil {
		return nil, fmt.Errorf("on InfiniBand: %w; on Ethernet: %w", err, ipErr)
	}
	return id, ipErr
}

func (f *Fabric) resolveAddr(ctx context.Context, s eventSink, w eventWaiter, src netip.Addr, dst netip.AddrPort) (*cmID, error) {
	id, err := f.newID(s, dst.Addr())
	if err != nil {
		return nil, err
	}
	if err := id.resolveDevice(ctx, w, src, dst); err != nil {
		id.destroyID()
		return nil, err
	}
	return id, nil
}

// linkLayer is "InfiniBand" or "Ethernet"; empty where the system does not tell.
func (i *cmID) linkLayer() string {
	d, err := i.f.deviceOf(C.rv_id_context(i.id))
	if err != nil {
		return ""
	}
	text, _ := os.ReadFile(fmt.Sprintf("/sys/class/infiniband/%s/ports/%d/link_layer", d.info.Name, C.rv_id_port_num(i.id)))
	return strings.TrimSpace(string(text))
}

// resolveDevice finds the device and the way to dst.
func (i *cmID) resolveDevice(ctx context.Context, w eventWaiter, src netip.Addr, dst netip.AddrPort) error {
	s, d := toC(netip.AddrPortFrom(src, 0)), toC(dst)
	err := errnoOf(C.rv_resolve_addr(i.id, &s, &d, C.int(resolveTimeout.Milliseconds())))
	switch {
	case errors.Is(err, syscall.ENODEV):
		return fmt.Errorf("%w has the address %s: %w", ErrNoDevice, verbs.AddrString(orDestination(src, dst.Addr())), err)
	case err != nil:
		return fmt.Errorf("resolve: %w", err)
	}
	_, err = w.awaitEvent(ctx, C.RDMA_CM_EVENT_ADDR_RESOLVED)
	return err
}

// resolveRoute finds the route to the address that was resolved.
func (i *cmID) resolveRoute(ctx context.Context, w eventWaiter) error {
	if err := errnoOf(C.rv_resolve_route(i.id, C.int(resolveTimeout.Milliseconds()))); err != nil {
		return fmt.Errorf("RDMA route: %w", err)
	}
	_, err := w.awaitEvent(ctx, C.RDMA_CM_EVENT_ROUTE_RESOLVED)
	return err
}

func orDestination(src, dst netip.Addr) netip.Addr {
	if src.IsValid() {
		return src
	}
	return dst
}

// awaitEvent waits for an event of the wanted kind; others are failures.
func (w eventWaiter) awaitEvent(ctx context.Context, want C.int) (cmEventCopy, error) {
	select {
	case e := <-w:
		if e.kind == want {
			return e, nil
		}
		return e, e.eventError()
	case <-ctx.Done():
		return cmEventCopy{}, context.Cause(ctx)
	}
}

// eventError explains an event that is not the one that was waited for.
func (e *cmEventCopy) eventError() error {
	errno := syscall.Errno(max(-e.status, 0))
	if errno == 0 {
		errno = syscall.ECONNABORTED
	}
	switch e.kind {
	case C.RDMA_CM_EVENT_ADDR_ERROR:
		if errno == syscall.ENODEV || errno == syscall.EADDRNOTAVAIL {
			return fmt.Errorf("%w leads there: %w", ErrNoDevice, errno)
		}
		return fmt.Errorf("the address does not resolve: %w", errno)
	case C.RDMA_CM_EVENT_ROUTE_ERROR:
		return fmt.Errorf("no RDMA route: %w", errno)
	case C.RDMA_CM_EVENT_UNREACHABLE:
		return fmt.Errorf("the peer does not answer: %w", errno)
	case C.RDMA_CM_EVENT_REJECTED:
		return rejectError(e.status)
	case C.RDMA_CM_EVENT_DEVICE_REMOVAL:
		return fmt.Errorf("the device was removed: %w", syscall.ENODEV)
	}
	return fmt.Errorf("connection manager event %d: %w", e.kind, errno)
}

// run reads the events of the connection manager and of the devices, for as
// long as the process lives: identifiers may be in use after Close.
func (f *Fabric) run(ch *cChannel) {
	fds := f.pollFDs(ch)
	for {
		if _, err := unix.Poll(fds, -1); err != nil && err != unix.EINTR {
			f.cfg.Logger.Error("ibverbs: wait for events", "err", err)
			time.Sleep(time.Second)
		}
		if fds[1].Revents != 0 {
			var b [8]byte
			unix.Read(f.wakefd, b[:])
			fds = f.pollFDs(ch)
			continue
		}
		f.cmEvents(ch)
		f.asyncEvents()
	}
}

// pollFDs are the descriptors of run.
func (f *Fabric) pollFDs(ch *cChannel) []unix.PollFd {
	fds := []unix.PollFd{{Fd: int32(C.rv_channel_fd(ch)), Events: unix.POLLIN}, {Fd: int32(f.wakefd), Events: unix.POLLIN}}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.devices {
		if !d.lost.Load() {
			fds = append(fds, unix.PollFd{Fd: int32(C.rv_async_fd(d.ctx)), Events: unix.POLLIN})
		}
	}
	return fds
}

func (f *Fabric) cmEvents(ch *cChannel) {
	for {
		var c C.struct_rv_event
		err := errnoOf(C.rv_next_event(ch, &c))
		if errors.Is(err, syscall.EAGAIN) {
			return
		}
		if err != nil {
			f.cfg.Logger.Error("ibverbs: read connection event", "err", err)
			return
		}
		e := cmEventCopy{kind: c._type, status: int(c.status), id: c.id}
		if c.private_len > 0 {
			e.private = C.GoBytes(unsafe.Pointer(&c.private_data[0]), c.private_len)
		}
		f.deliverEvent(uint64(c.handle), e)
	}
}

func (f *Fabric) deliverEvent(handle uint64, e cmEventCopy) {
	f.mu.Lock()
	var s eventSink
	if i := f.ids[handle]; i != nil {
		s = i.sink
	}
	f.mu.Unlock()
	switch {
	case s != nil:
		s.cmEvent(e)
	case e.kind == C.RDMA_CM_EVENT_CONNECT_REQUEST: // of a listener that is gone
		C.rv_destroy_id(e.id)
	}
}

// asyncEvents reads the asynchronous events of all devices.
func (f *Fabric) asyncEvents() {
	f.mu.Lock()
	var devs []*Device
	for _, d := range f.devices {
		devs = append(devs, d)
	}
	f.mu.Unlock()
	for _, d := range devs {
		d.asyncEvents()
	}
}
