package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// open sends OPEN for d and takes over what the server says.
func (d *Device) open(ctx context.Context) error {
	msg, err := d.openMessage()
	if err != nil {
		return fmt.Errorf("open %q: %v: %w", d.path, err, syscall.ENAMETOOLONG)
	}
	rsp := make(rnbdwire.OpenRsp, rnbdwire.OpenRspSize)
	if err := d.session.transport.AdminRead(ctx, msg, rsp); err != nil {
		return fmt.Errorf("open %q on the server: %w", d.path, err)
	}
	limits, err := d.limitsOf(rsp.Fields())
	if err != nil {
		d.sendClose(ctx, rsp.Fields().DeviceID)
		return err
	}
	if err := d.take(rsp.Fields().DeviceID, limits); err != nil {
		d.sendClose(ctx, rsp.Fields().DeviceID)
		return err
	}
	return nil
}

// openMessage is OPEN; with the io mode of the user's wish where the server
// takes one.
func (d *Device) openMessage() ([]byte, error) {
	f := rnbdwire.OpenFields{AccessMode: uint8(d.mode), Name: d.path}
	if d.ioMode != "" && d.session.features.Load()&rnbdwire.FeatureOpenAs != 0 {
		msg := make([]byte, rnbdwire.OpenAsSize)
		return msg, rnbdwire.OpenAsFields{OpenFields: f, IOMode: d.ioMode}.Put(msg)
	}
	if d.ioMode != "" {
		d.log.Warn("the server chooses the io mode itself", "asked", d.ioMode)
	}
	msg := make([]byte, rnbdwire.OpenSize)
	return msg, f.Put(msg)
}

// take makes the server's word the device's. Where requests wait for the
// return of the server, one that has become smaller is refused: they were
// accepted for the larger one.
func (d *Device) take(id uint32, l *blk.Limits) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if l.Size < d.served && d.gate.Load() == gateWait {
		return fmt.Errorf("open %q: the device shrank from %d to %d bytes: %w", d.path, d.served, l.Size, errShrank)
	}
	d.served = l.Size
	d.id.Store(id)
	d.limits.Store(l)
	return nil
}

var errShrank = fmt.Errorf("smaller than before: %w", syscall.EIO)

// limitsOf translates OPEN_RSP; sizes travel in 512-byte sectors.
func (d *Device) limitsOf(f rnbdwire.OpenRspFields) (*blk.Limits, error) {
	lbs := uint32(f.LogicalBlockSize)
	if lbs < blk.SectorSize || lbs > 4096 || lbs&(lbs-1) != 0 {
		return nil, fmt.Errorf("open %q: the server's logical block size %d is unusable: %w", d.path, lbs, syscall.EINVAL)
	}
	if f.Sectors > maxSectors {
		return nil, fmt.Errorf("open %q: the server's size of %d sectors is unusable: %w", d.path, f.Sectors, syscall.EINVAL)
	}
	l := &blk.Limits{
		Size:               f.Sectors * blk.SectorSize,
		LogicalBlockSize:   lbs,
		PhysicalBlockSize:  max(uint32(f.PhysicalBlockSize), lbs),
		MaxIOSize:          uint32(d.slotSize()),
		MaxDiscard:         uint64(f.MaxDiscardSectors) * blk.SectorSize,
		DiscardGranularity: f.DiscardGranularity,
		DiscardAlignment:   f.DiscardAlignment,
		MaxWriteZeroes:     uint64(f.MaxWriteZeroesSects) * blk.SectorSize,
		MaxSegments:        f.MaxSegments,
		SecureErase:        f.SecureDiscard != 0,
		WriteCache:         f.CachePolicy&rnbdwire.CacheWriteBack != 0,
		Rotational:         f.Rotational,
		ReadOnly:           d.mode == blk.ReadOnly,
	}
	l.FUA = l.WriteCache && f.CachePolicy&rnbdwire.CacheFUA != 0
	return l, nil
}

// sendClose is CLOSE for id; what the server says to it changes nothing.
func (d *Device) sendClose(ctx context.Context, id uint32) {
	msg := make(rnbdwire.Close, rnbdwire.CloseSize)
	rnbdwire.CloseFields{DeviceID: id}.Put(msg)
	if err := d.session.transport.AdminWrite(ctx, msg); err != nil {
		d.log.Warn("closing the device on the server failed", "error", err)
	}
}

// onLost: the session has no path left.
func (d *Device) onLost() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != Open {
		return
	}
	d.setState(Closed)
	if d.loss.Queue == 0 {
		d.setGate(gateFail)
		return
	}
	d.setGate(gateWait)
	d.patience = time.AfterFunc(d.loss.Queue, d.onTooLate)
}

// onTooLate: requests have waited for as long as they may.
func (d *Device) onTooLate() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != Closed || d.patience == nil {
		return
	}
	d.giveUp(fmt.Errorf("no path to the server for %s: %w", d.loss.Queue, syscall.ETIMEDOUT))
}

// giveUp leaves d closed until it is remapped. Caller holds mu.
func (d *Device) giveUp(err error) {
	d.stopPatience()
	d.needsRemap = true
	d.lastError = err.Error()
	d.setGate(gateFail)
	d.log.Error("device stays closed until it is remapped", "error", err)
}

func (d *Device) stopPatience() {
	if d.patience != nil {
		d.patience.Stop()
		d.patience = nil
	}
}

func (d *Device) wantsReopen() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state == Closed && !d.needsRemap
}

// reopen opens d after the session came back. An error means: try again.
func (d *Device) reopen(ctx context.Context) error {
	d.session.opens.RLock()
	defer d.session.opens.RUnlock()
	err := d.open(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.state != Closed || d.needsRemap:
		if err == nil && d.state == Unmapped {
			go d.sendClose(context.WithoutCancel(ctx), d.id.Load())
		}
		return nil
	case err == nil:
		d.opened()
		return nil
	case final(err):
		d.giveUp(err)
		return nil
	}
	d.lastError = err.Error()
	d.log.Warn("device does not open again yet", "error", err)
	return err
}

// final tells whether an OPEN after a reconnect may succeed if tried again.
func final(err error) bool {
	for _, errno := range []error{syscall.EPERM, syscall.ENOENT, syscall.EINVAL, syscall.ENOTBLK, syscall.EACCES, errShrank} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// opened lets requests through. Caller holds mu.
func (d *Device) opened() {
	d.stopPatience()
	d.needsRemap, d.lastError = false, ""
	d.setState(Open)
	d.setGate(gateOpen)
	if fe := d.fe.Load(); fe != nil {
		go fe.resize(d)
	}
}

// Remap opens a closed device again: the way back after requests had to fail.
func (c *Client) Remap(ctx context.Context, name string) (*Device, error) {
	d, err := c.Device(name)
	if err != nil {
		return nil, err
	}
	switch d.State() {
	case Open:
		return nil, fmt.Errorf("remap %s: it is open: %w", d.name, syscall.EALREADY)
	case Unmapped:
		return nil, fmt.Errorf("remap %s: it is being unmapped: %w", d.name, syscall.ENODEV)
	case Init:
		return nil, fmt.Errorf("remap %s: it is being mapped: %w", d.name, syscall.EBUSY)
	}
	if !d.session.transport.Connected() {
		return nil, fmt.Errorf("remap %s: session %q has no path to the server: %w", d.name, d.session.name, syscall.ECONNABORTED)
	}
	d.session.opens.RLock()
	defer d.session.opens.RUnlock()
	if err := d.open(ctx); err != nil {
		return nil, fmt.Errorf("remap %s: %w", d.name, err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == Closed {
		d.opened()
	}
	return d, nil
}
