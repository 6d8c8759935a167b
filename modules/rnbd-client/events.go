package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// News from a server of this project: docs/extend/protocol/rnbd.md, "Events". While
// the session is connected, one EVENT waits at the server. RTRS moves it to
// another path when its own is lost. After the loss of the last path, the
// answer to OPEN includes the events missed.

// minEventDepth is the smallest queue depth with a permit to spare for EVENT.
const minEventDepth = 8

// startEvents starts to receive events, if the server sends any, and ends an earlier
// listen. Only one goroutine may call it at a time. Listening ends with the
// session's last path.
func (s *session) startEvents() {
	s.unlisten()
	if s.features.Load()&rnbdwire.FeatureEvents == 0 || s.transport.QueueDepth() < minEventDepth {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	s.unlisten = func() { cancel(); <-ended }
	go func() {
		defer close(ended)
		s.receiveEvents(ctx)
	}()
}

// receiveEvents receives and handles events until the session is lost or ctx ends.
func (s *session) receiveEvents(ctx context.Context) {
	msg := make(rnbdwire.Event, rnbdwire.EventSize)
	rsp := make(rnbdwire.EventRsp, rnbdwire.EventRspSize)
	var seen uint64
	holds := false
	for {
		rnbdwire.EventFields{Seen: seen, Holds: holds}.Put(msg)
		if err := s.transport.AdminListen(ctx, msg, rsp); err != nil {
			if ctx.Err() == nil && !errors.Is(err, syscall.ECONNABORTED) {
				s.log.Warn("no more news from the server", "err", err)
			}
			return
		}
		e := rsp.Fields()
		if !rsp.IsValid() || e.Number <= seen {
			s.log.Warn("no more news from the server: what it sent is none", "kind", e.Kind, "number", e.Number, "seen", seen)
			return
		}
		seen = e.Number
		if e.Kind == rnbdwire.EventHandOver {
			holds = s.onHandOver(ctx, e.Sectors)
			continue
		}
		s.onServerEvent(e)
	}
}

// onServerEvent handles one event. Unknown kinds of later servers are
// ignored.
func (s *session) onServerEvent(e rnbdwire.EventRspFields) {
	if e.Kind == rnbdwire.EventDrain {
		s.log.Warn("the server is about to end")
		return
	}
	d := s.deviceByID(e.DeviceID)
	if d == nil {
		s.keepEarly(e)
		d = s.deviceByID(e.DeviceID) // its OPEN may have ended just before
	}
	if d != nil {
		d.onServerEvent(e)
	}
}

func (d *Device) onServerEvent(e rnbdwire.EventRspFields) {
	switch e.Kind {
	case rnbdwire.EventResize:
		d.onResized(e.Sectors)
	case rnbdwire.EventRemoved:
		d.onRemoved()
	case rnbdwire.EventShared:
		d.onShared()
	case rnbdwire.EventFailed:
		d.onFailed("it has failed on the server, which answers its requests with EIO")
	case rnbdwire.EventBack:
		d.onFailed("")
		d.onResized(e.Sectors)
	}
}

// maxEarly bounds the events kept for OPENs under way.
const maxEarly = 256

// keepEarly keeps an event of an unknown device while OPENs are under way: it
// may belong to one of them.
func (s *session) keepEarly(e rnbdwire.EventRspFields) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.opening > 0 && len(s.early) < maxEarly {
		s.early = append(s.early, e)
	}
}

// awaitOpen is called before an OPEN. Its result must be called when the
// answer has been handled. Then d gets the events that came in between.
func (s *session) awaitOpen(d *Device) (taken func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opening++
	return func() {
		s.mu.Lock()
		early := s.early
		if s.opening--; s.opening == 0 {
			s.early = nil
		}
		s.mu.Unlock()
		for _, e := range early {
			if s.deviceByID(e.DeviceID) == d {
				d.onServerEvent(e)
			}
		}
	}
}

// deviceByID returns the device with that id on the server, or nil.
func (s *session) deviceByID(id uint32) *Device {
	for _, d := range s.listDevices() {
		state := d.State()
		if (state == Open || state == Init || d.wasDenied()) && d.limits.Load() != nil && d.id.Load() == id {
			return d
		}
	}
	return nil
}

// onResized stores a new size from the server, as the kernel's client does
// after a reconnect. Later requests beyond it fail with EIO. The server
// answers those under way.
func (d *Device) onResized(sectors uint64) {
	if err := d.takeSize(sectors); err != nil {
		d.log.Warn("the server's new size is refused", "sectors", sectors, "err", err)
		return
	}
	if fe := d.fe.Load(); fe != nil {
		fe.resizeDevice(d)
	}
}

func (d *Device) takeSize(sectors uint64) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	l := *d.limits.Load()
	size := sectors * blk.SectorSize
	if sectors > maxSectors || size%uint64(l.LogicalBlockSize) != 0 {
		return fmt.Errorf("not a whole number of blocks, or too many: %w", syscall.EINVAL)
	}
	d.log.Info("device resized by the server", "from", l.Size, "to", size)
	d.recordSize(l.Size, size)
	l.Size, d.served = size, size
	d.limits.Store(&l)
	return nil
}

// onRemoved handles the close of the device by the server. Its requests fail. A
// remap opens it again.
func (d *Device) onRemoved() {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.state == Open:
		d.setState(Closed)
	case d.state != Closed || !d.deniedOpen: // denied: a request was answered before
		return
	}
	d.openedIn, d.deniedOpen = 0, false
	d.giveUp(fmt.Errorf("it was closed on the server: %w", syscall.ENOTCONN))
}

// onFailed stores the reason why requests of an open device fail on the server.
// If it is empty, they no longer fail.
func (d *Device) onFailed(why string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == Open || d.state == Init {
		d.failing = why != ""
		d.lastError = why
		d.log.Info("news of the device from the server", "failing", d.failing)
		d.recordFailing(why)
	}
}
