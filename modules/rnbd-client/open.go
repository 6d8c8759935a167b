package client

import (
	"context"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// OPEN and CLOSE of a device on the server.

// open sends OPEN for d and handles the answer.
func (d *Device) open(ctx context.Context) error { return d.openAccepting(ctx, false) }

// openAccepting does what open does. accept allows another volume than before.
func (d *Device) openAccepting(ctx context.Context, accept bool) error {
	msg, err := d.openMessage()
	if err != nil {
		return fmt.Errorf("open %q: %v: %w", d.path, err, syscall.ENAMETOOLONG)
	}
	epoch := d.session.currentEpoch()
	rsp, err := d.sendOpen(ctx, epoch, msg)
	if err != nil {
		return d.refusalError(err, d.askReason(ctx))
	}
	f := rsp.Fields()
	if d.session.features.Load()&rnbdwire.FeatureIdentity == 0 {
		f.Volume = 0 // the bytes have no meaning
	}
	id := f.DeviceID
	limits, err := d.limitsOf(f)
	if err == nil {
		err = d.askWriters(ctx, epoch, id)
	}
	if err == nil {
		err = d.acceptOpen(epoch, id, limits, knownOf(&f, limits), accept)
		d.client.flushState() // the verifier may be a new one
	}
	if err != nil {
		d.closeUnwanted(ctx, epoch, id)
	}
	return err
}

// sendOpen sends an OPEN and waits for its answer. If it is given up and answered
// later, the device is closed on the server.
func (d *Device) sendOpen(ctx context.Context, epoch uint64, msg []byte) (rnbdwire.OpenRsp, error) {
	if err := d.session.awaitClosed(ctx, d.path); err != nil {
		return nil, err
	}
	rsp := make(rnbdwire.OpenRsp, rnbdwire.OpenRspSize)
	if d.session.features.Load()&rnbdwire.FeatureVerifier != 0 {
		rsp = make(rnbdwire.OpenRsp, rnbdwire.OpenRspFullSize)
	}
	answered := make(chan error, 1)
	go func() { answered <- d.session.transport.AdminRead(context.WithoutCancel(ctx), msg, rsp) }()
	select {
	case err := <-answered:
		return rsp, err
	case <-ctx.Done():
		go func() {
			if err := <-answered; err == nil && !d.client.opensPath(d.session, d.path) {
				d.sendClose(ctx, epoch, rsp.Fields().DeviceID)
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// opensPath reports whether a mapping has that path of the session. A server
// has one open per name, even for several OPENs.
func (c *Client) opensPath(s *session, path string) bool {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	c.mu.Lock() // devices being mapped join their sessions with mu held
	defer c.mu.Unlock()
	for _, p := range c.places {
		if p.d.session == s && p.d.path == path {
			return true
		}
	}
	return false
}

// closeUnwanted closes a device that was opened on the server for d and is not used.
func (d *Device) closeUnwanted(ctx context.Context, epoch uint64, id uint32) {
	d.mu.Lock()
	if d.openedIn == epoch { // the server has one open per name, even for two OPENs
		d.openedIn = 0
	}
	d.mu.Unlock()
	d.sendClose(ctx, epoch, id)
}

// openMessage returns an OPEN, with the io mode that the user asks for if the
// server takes one.
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

// acceptOpen stores the server's answer in d. It refuses a smaller device while
// requests wait for the return of the server, because they were accepted for
// the larger one. It refuses a device that differs from the facts that users
// know, see known. From then on the end of d sends CLOSE.
func (d *Device) acceptOpen(epoch uint64, id uint32, l *blk.Limits, now *deviceFacts, accept bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if epoch != d.session.currentEpoch() {
		return fmt.Errorf("open %q: %w", d.path, errVoid)
	}
	if d.state == Unmapped {
		return fmt.Errorf("open %q: it was unmapped meanwhile: %w", d.path, syscall.ENODEV)
	}
	if d.known != nil && d.known.Block != 0 {
		l.Size -= l.Size % uint64(d.known.Block)
	}
	if l.Size < d.served && d.gate.Load() == gateWait {
		return fmt.Errorf("open %q: the device shrank from %d to %d bytes: %w", d.path, d.served, l.Size, errShrank)
	}
	if d.known != nil {
		if err := d.known.checkSuccessor(now, accept); err != nil {
			return fmt.Errorf("open %q: %w", d.path, err)
		}
		l.MaxIOSize, l.WriteCache, l.FUA = now.MaxIO, now.WriteCache, now.FUA
		l.LogicalBlockSize, l.PhysicalBlockSize = now.Block, max(l.PhysicalBlockSize, now.Block)
	}
	if d.compareVerifier(now) {
		defer d.client.requestSave()
	}
	d.known = now
	d.served = l.Size
	d.id.Store(id)
	d.limits.Store(l)
	d.openedIn = epoch
	return nil
}

// limitsOf converts OPEN_RSP. Its sizes are in sectors of 512 bytes.
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
		MaxIOSize:          uint32(d.session.maxIO()),
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

// sendClose sends CLOSE for the id that OPEN returned in epoch; in a later one the
// id may belong to another device. It waits for the answer only briefly, because
// the disk behind it may hang. The next OPEN of the path waits for it, see
// awaitClosed. CLOSE is sent even if ctx ends, for instance because a map was
// cancelled.
func (d *Device) sendClose(ctx context.Context, epoch uint64, id uint32) {
	if epoch != d.session.currentEpoch() || !d.session.transport.Connected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), forcedClose)
	defer cancel()
	msg := make(rnbdwire.Close, rnbdwire.CloseSize)
	rnbdwire.CloseFields{DeviceID: id}.Put(msg)
	if err := d.session.transport.AdminWriteOnce(ctx, msg, d.session.beginClose(d.path, epoch)); err != nil {
		d.log.Warn("closing the device on the server failed", "err", err)
	}
}
