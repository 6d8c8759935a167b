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

// open sends OPEN for d and handles the answer.
func (d *Device) open(ctx context.Context) error { return d.openAccepting(ctx, false) }

// openAccepting does what open does. accept allows another volume than before.
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
		f.Volume = 0 // the bytes have no meaning
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

// ask sends an OPEN and waits for its answer. If it is given up and answered
// later, the device is closed on the server.
func (d *Device) ask(ctx context.Context, epoch uint64, msg []byte) (rnbdwire.OpenRsp, error) {
	if err := d.session.awaitClosed(ctx, d.path); err != nil {
		return nil, err
	}
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

// giveBack closes a device that was opened on the server for d and is not used.
func (d *Device) giveBack(ctx context.Context, epoch uint64, id uint32) {
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

// take stores the server's answer in d. It refuses a smaller device while
// requests wait for the return of the server, because they were accepted for
// the larger one. It refuses a device that differs from the facts that users
// know, see known. From then on the end of d sends CLOSE.
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

// sendClose sends CLOSE for the id that OPEN returned. It waits for the answer
// only briefly, because the disk behind it may hang. The next OPEN of the path
// waits for it, see awaitClosed. After that epoch the id may belong to another device. CLOSE is sent
// even if ctx ends, for instance because a map was cancelled.
func (d *Device) sendClose(ctx context.Context, epoch uint64, id uint32) {
	if epoch != d.session.epoch() || !d.session.transport.Connected() {
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

// onLost handles the loss of the session's last path. why is its reason.
func (d *Device) onLost(why string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == Open {
		d.lastError = why
		d.close()
	}
}

// close makes the requests of d wait or fail until it is open again. The caller
// holds mu.
func (d *Device) close() {
	d.setState(Closed)
	d.failing = false
	if d.loss.Queue == 0 {
		d.setGate(gateFail)
		return
	}
	d.setGate(gateWait)
	if d.loss.Queue != Forever {
		d.patienceEnds = time.Now().Add(d.loss.Queue)
		d.patience = time.AfterFunc(d.loss.Queue, d.onTooLate)
	}
}

// onTooLate fails requests that have waited for the time of loss=queue.
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

// giveUp leaves d closed until it is remapped. The caller holds mu.
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

// reopensAtOnce bounds the concurrent OPENs that open devices of one session
// again. OPENs that hang leave permits to other requests.
const reopensAtOnce = 16

// beginReopen reports whether d is to be opened again and no goroutine is doing
// that yet.
func (d *Device) beginReopen() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.reopening || d.state != Closed || d.needsRemap {
		return false
	}
	d.reopening = true
	return true
}

// goesOn reports whether d is still to be opened. If not, the reopening has
// ended.
func (d *Device) goesOn() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reopening = d.state == Closed && !d.needsRemap && d.session.ready.Load()
	return d.reopening
}

// reopenUntilOpen opens d after the session returned, or after the server
// denied to know it. It ends when d is open or given up, or when the session is
// lost. The session's next return begins another one.
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

// newsDelay bounds the delay of the news that a device was closed on the server
// by hand. Such a device is not opened again automatically.
const newsDelay = 300 * time.Millisecond

// pause waits for d. It reports false if the session has been closed.
func (s *session) pause(d time.Duration) bool {
	select {
	case <-s.done:
		return false
	case <-time.After(d):
		return true
	}
}

// reopen tries once to open d again. After an error the caller tries again.
func (d *Device) reopen(ctx context.Context) error {
	defer d.session.awaitOpen(d)()
	return d.reopened(d.open(ctx))
}

// onDenied closes d if the server has answered a request with the error that it
// does not know the device: it has closed the device, or it was restarted.
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

// reopened ends a reopen. err is the result of its OPEN.
func (d *Device) reopened(err error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != Closed || d.needsRemap {
		return nil // no caller waits for it; its unmap closes it on the server
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

// final reports whether err, of an OPEN after a reconnect, will not go away by
// trying again.
func final(err error) bool {
	for _, errno := range []error{syscall.EPERM, syscall.ENOENT, syscall.EINVAL, syscall.ENOTBLK, syscall.EACCES, errShrank, errOtherVolume, errChanged} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// opened lets requests through, unless the session was lost after the answer to
// OPEN: then the id is void, and d would not hear of that loss. The caller
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

// Remap opens a closed device again. It is the way back after requests have
// failed.
func (c *Client) Remap(ctx context.Context, name string) (*Device, error) {
	return c.remapAs(ctx, name, false)
}

// RemapNew does what Remap does and also accepts another volume. A disk of the
// last daemon that waits for its server accepts it at its next try; then
// RemapNew returns no device.
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
			return c.renew(ctx, d, why)
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

// renew opens a device again that has failed on the server. why is the reason.
// If it had failed for good and its plugin runs, the server gives it another
// id.
func (c *Client) renew(ctx context.Context, d *Device, why string) (*Device, error) {
	defer d.session.awaitOpen(d)()
	old := d.id.Load()
	err := d.open(ctx)
	if err == nil && d.id.Load() == old {
		return nil, fmt.Errorf("remap %s: %s: %w", d.name, why, syscall.EIO)
	}
	if err != nil {
		return nil, fmt.Errorf("remap %s: %s; it does not open again: %v: %w", d.name, why, err, syscall.EIO)
	}
	d.mu.Lock()
	if d.state == Open {
		d.failing, d.lastError = false, ""
	}
	d.mu.Unlock()
	if err := d.remapped(); err != nil {
		return nil, fmt.Errorf("remap %s: %w", d.name, err)
	}
	return d, nil
}

// failure returns the reason why requests of d fail on the server, empty if
// they do not.
func (d *Device) failure() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.failing {
		return ""
	}
	return d.lastError
}

// failed stores the reason why d is still closed.
func (d *Device) failed(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == Closed {
		d.lastError = err.Error()
	}
}

// remapped ends a remap after the answer to its OPEN.
func (d *Device) remapped() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch d.state {
	case Closed:
		return d.opened()
	case Unmapped: // the unmap has sent CLOSE
		return fmt.Errorf("it was unmapped meanwhile: %w", syscall.ENODEV)
	}
	return nil
}
