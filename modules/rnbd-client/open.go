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
func (d *Device) open(ctx context.Context) error { return d.openAccepting(ctx, false) }

// openAccepting is open. accept: the name may lead to another volume than before.
func (d *Device) openAccepting(ctx context.Context, accept bool) error {
	msg, err := d.openMessage()
	if err != nil {
		return fmt.Errorf("open %q: %v: %w", d.path, err, syscall.ENAMETOOLONG)
	}
	epoch := d.session.epoch()
	rsp, err := d.ask(ctx, epoch, msg)
	if err != nil {
		return d.refusal(err)
	}
	f := rsp.Fields()
	if d.session.features.Load()&rnbdwire.FeatureIdentity == 0 {
		f.Volume = 0 // bytes without a meaning
	}
	id := f.DeviceID
	limits, err := d.limitsOf(f)
	if err == nil {
		err = d.askSharing(ctx, epoch, id)
	}
	if err == nil {
		err = d.take(epoch, id, limits, knownOf(f.Volume, limits), accept)
	}
	if err != nil {
		d.giveBack(ctx, epoch, id)
	}
	return err
}

// ask sends an OPEN and waits for its answer. One that is given up is closed on the
// server when it is answered after all.
func (d *Device) ask(ctx context.Context, epoch uint64, msg []byte) (rnbdwire.OpenRsp, error) {
	rsp := make(rnbdwire.OpenRsp, rnbdwire.OpenRspSize)
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

// giveBack closes on the server what OPEN opened and d cannot be.
func (d *Device) giveBack(ctx context.Context, epoch uint64, id uint32) {
	d.mu.Lock()
	if d.openedIn == epoch { // a server has one open of a name, also for two OPENs
		d.openedIn = 0
	}
	d.mu.Unlock()
	d.sendClose(ctx, epoch, id)
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
// accepted for the larger one. One that is not what its users know is refused, see
// known. From here on the end of d sends CLOSE.
func (d *Device) take(epoch uint64, id uint32, l *blk.Limits, now *known, accept bool) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if epoch != d.session.epoch() {
		return fmt.Errorf("open %q: %w", d.path, errVoid)
	}
	if d.state == Unmapped {
		return fmt.Errorf("open %q: it was unmapped meanwhile: %w", d.path, syscall.ENODEV)
	}
	if l.Size < d.served && d.gate.Load() == gateWait {
		return fmt.Errorf("open %q: the device shrank from %d to %d bytes: %w", d.path, d.served, l.Size, errShrank)
	}
	if d.known != nil {
		if err := d.known.admit(now, accept); err != nil {
			return fmt.Errorf("open %q: %w", d.path, err)
		}
		l.MaxIOSize, l.WriteCache, l.FUA = now.MaxIO, now.WriteCache, now.FUA
	}
	d.known = now
	d.served = l.Size
	d.id.Store(id)
	d.limits.Store(l)
	d.openedIn = epoch
	return nil
}

var (
	errShrank = fmt.Errorf("smaller than before: %w", syscall.EIO)
	errVoid   = fmt.Errorf("the session was lost before it was open: %w", syscall.ECONNABORTED)
)

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

// sendClose is CLOSE for what OPEN opened as id; what the server says to it
// changes nothing, and it is not waited for long: behind it may be a disk that
// hangs. After that epoch the id may be another device's. The end of ctx, as of a
// map that is given up, is no reason to leave the device open.
func (d *Device) sendClose(ctx context.Context, epoch uint64, id uint32) {
	if epoch != d.session.epoch() || !d.session.transport.Connected() {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), forcedClose)
	defer cancel()
	msg := make(rnbdwire.Close, rnbdwire.CloseSize)
	rnbdwire.CloseFields{DeviceID: id}.Put(msg)
	if err := d.session.transport.AdminWrite(ctx, msg); err != nil {
		d.log.Warn("closing the device on the server failed", "err", err)
	}
}

// onLost handles the loss of the session's last path, for the reason why.
func (d *Device) onLost(why string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == Open {
		d.lastError = why
		d.close()
	}
}

// close has the requests of d wait or fail until it is open again. Caller holds mu.
func (d *Device) close() {
	d.setState(Closed)
	d.failing = false
	if d.loss.Queue == 0 {
		d.setGate(gateFail)
		return
	}
	d.setGate(gateWait)
	d.patience = time.AfterFunc(d.loss.Queue, d.onTooLate)
}

// onTooLate fails requests that have waited for as long as they may.
func (d *Device) onTooLate() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != Closed || d.patience == nil {
		return
	}
	why := "no path to the server"
	if d.session.transport.Connected() {
		why = "the server has not opened it again"
	}
	d.giveUp(fmt.Errorf("%s for %s: %w", why, d.loss.Queue, syscall.ETIMEDOUT))
}

// giveUp leaves d closed until it is remapped. Caller holds mu.
func (d *Device) giveUp(err error) {
	d.stopPatience()
	d.needsRemap = true
	d.lastError = err.Error()
	d.setGate(gateFail)
	d.log.Error("device stays closed until it is remapped", "err", err)
}

func (d *Device) stopPatience() {
	if d.patience != nil {
		d.patience.Stop()
		d.patience = nil
	}
}

// reopensAtOnce bounds the OPENs of devices of one session that are opened again by
// themselves: what hangs leaves places to the others.
const reopensAtOnce = 16

// beginReopen reports whether d is to be opened again and no goroutine does that
// yet.
func (d *Device) beginReopen() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reopening || d.state != Closed || d.needsRemap {
		return false
	}
	d.reopening = true
	return true
}

// goesOn reports whether d is still to be opened; otherwise the reopening has ended.
func (d *Device) goesOn() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reopening = d.state == Closed && !d.needsRemap && d.session.ready.Load()
	return d.reopening
}

// reopenUntilOpen opens d after the session came back, or after the server denied to
// know it. It ends when d is open, is given up, or the session is lost: then its
// return begins another one.
func (d *Device) reopenUntilOpen() {
	s := d.session
	if d.wasDenied() && s.features.Load()&rnbdwire.FeatureEvents != 0 && !s.pause(newsDelay) {
		return
	}
	for d.goesOn() {
		select {
		case s.turns <- struct{}{}:
		case <-s.done:
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.client.cfg.MapTimeout)
		err := d.reopen(ctx)
		cancel()
		<-s.turns
		if err != nil && !s.pause(reopenDelay) {
			return
		}
	}
}

// newsDelay bounds the delay of the news that a device was closed on the server by
// hand. Such a device is not opened again automatically.
const newsDelay = 300 * time.Millisecond

// pause waits, and reports whether the session goes on.
func (s *session) pause(d time.Duration) bool {
	select {
	case <-s.done:
		return false
	case <-time.After(d):
		return true
	}
}

// reopen opens d again once. An error means: try again.
func (d *Device) reopen(ctx context.Context) error {
	defer d.session.awaitOpen(d)()
	return d.reopened(d.open(ctx))
}

// onDenied closes d if the server has answered a request of it that it does not know
// the device: it has closed it, or is another one than it was.
func (d *Device) onDenied() {
	if !d.denied.Swap(false) {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != Open {
		return
	}
	d.openedIn, d.deniedOpen = 0, true
	d.lastError = fmt.Sprintf("the server does not know the device any more: %v", syscall.ENOTCONN)
	d.log.Warn("device is not open on the server any more, it is opened again")
	d.close()
}

func (d *Device) wasDenied() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.deniedOpen
}

// reopened ends a reopen whose OPEN had that result.
func (d *Device) reopened(err error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != Closed || d.needsRemap {
		return nil // no caller waits for it; its end closes it on the server
	}
	if err == nil {
		err = d.opened()
	}
	switch {
	case err == nil:
		return nil
	case final(err):
		d.giveUp(err)
		return nil
	}
	d.lastError = err.Error()
	d.log.Warn("device does not open again yet", "err", err)
	return err
}

// final reports whether an OPEN after a reconnect may succeed if tried again.
func final(err error) bool {
	for _, errno := range []error{syscall.EPERM, syscall.ENOENT, syscall.EINVAL, syscall.ENOTBLK, syscall.EACCES, errShrank, errOtherVolume, errChanged} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// opened lets requests through, unless the session was lost since OPEN was
// answered: d would not be told of that any more, and its id is void. The caller
// holds mu.
func (d *Device) opened() error {
	if d.openedIn != d.session.epoch() {
		return errVoid
	}
	d.stopPatience()
	d.needsRemap, d.deniedOpen = false, false
	if !d.failing { // news that came before
		d.lastError = ""
	}
	d.setState(Open)
	d.setGate(gateOpen)
	if fe := d.fe.Load(); fe != nil {
		go fe.resize(d)
	}
	return nil
}

// Remap opens a closed device again: the way back after requests had to fail.
func (c *Client) Remap(ctx context.Context, name string) (*Device, error) {
	return c.remapAs(ctx, name, false)
}

// RemapNew is Remap that takes another volume than the device had. A disk of the
// last daemon that waits for its server takes it, too, with the next attempt: then
// there is no device.
func (c *Client) RemapNew(ctx context.Context, name string) (*Device, error) {
	if c.acceptWaiting(name) {
		return nil, nil
	}
	return c.remapAs(ctx, name, true)
}

func (c *Client) remapAs(ctx context.Context, name string, accept bool) (*Device, error) {
	d, err := c.Device(name)
	if err != nil {
		return nil, err
	}
	switch d.State() {
	case Open:
		if why := d.failure(); why != "" {
			return nil, fmt.Errorf("remap %s: %s: %w", d.name, why, syscall.EIO)
		}
		return nil, fmt.Errorf("remap %s: it is open: %w", d.name, syscall.EALREADY)
	case Unmapped:
		return nil, fmt.Errorf("remap %s: it is being unmapped: %w", d.name, syscall.ENODEV)
	case Init:
		return nil, fmt.Errorf("remap %s: it is being mapped: %w", d.name, syscall.EBUSY)
	}
	if !d.session.transport.Connected() {
		return nil, fmt.Errorf("remap %s: session %q has no path to the server: %w", d.name, d.session.name, syscall.ECONNABORTED)
	}
	defer d.session.awaitOpen(d)()
	if err := d.openAccepting(ctx, accept); err != nil {
		d.failed(err)
		return nil, fmt.Errorf("remap %s: %w", d.name, err)
	}
	if err := d.remapped(); err != nil {
		return nil, fmt.Errorf("remap %s: %w", d.name, err)
	}
	return d, nil
}

// failure returns why requests of d fail on the server, empty if they do not.
func (d *Device) failure() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.failing {
		return ""
	}
	return d.lastError
}

// failed notes why d is closed still.
func (d *Device) failed(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == Closed {
		d.lastError = err.Error()
	}
}

// remapped ends a remap whose OPEN was answered.
func (d *Device) remapped() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch d.state {
	case Closed:
		return d.opened()
	case Unmapped: // which has sent CLOSE
		return fmt.Errorf("it was unmapped meanwhile: %w", syscall.ENODEV)
	}
	return nil
}
