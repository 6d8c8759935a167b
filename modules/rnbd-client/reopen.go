package client

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// A device without its server: it closes, its requests wait or fail, and it is
// opened again.

// onLost handles the loss of the session's last path. why is its reason.
func (d *Device) onLost(why string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state == Open {
		d.lastError = why
		d.close()
	}
}

// onDenied closes d if the server has answered a request with ENOTCONN: it does not
// know the device, because it has closed it or was restarted.
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

// close makes the requests of d wait or fail until it is open again. The caller
// holds mu.
func (d *Device) close() {
	d.setState(Closed)
	d.failing, d.stopped, d.expired = false, false, false
	if !d.waitsForPath() {
		d.setGate(gateFail)
		return
	}
	d.setGate(gateWait)
	if d.loss.Queue != 0 && d.loss.Queue != Forever {
		d.patienceEnds = time.Now().Add(d.loss.Queue)
		d.patience = time.AfterFunc(d.loss.Queue, d.onTooLate)
	}
}

// onTooLate fails the requests of a device that did not open again within the time
// of its option loss=queue.
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
	d.failWaiting(fmt.Errorf("%s for %s: %w", why, d.loss.Queue, syscall.ETIMEDOUT))
}

// reopensAtOnce bounds the concurrent OPENs that open devices of one session
// again. OPENs that hang leave permits to other requests.
const reopensAtOnce = 16

// reopenDelay is the pause before OPEN is tried again after a temporary
// failure, for instance of a server that has not found the device yet. Later
// pauses double up to longestReopenDelay.
const (
	reopenDelay        = 500 * time.Millisecond
	longestReopenDelay = 4 * time.Second
)

// reopenPause returns the pause before OPEN is tried again, after a number of tries.
func (s *session) reopenPause(tries int) time.Duration {
	if s.leaving.Load() {
		return returnPause
	}
	return min(reopenDelay<<min(tries, 3), longestReopenDelay)
}

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

// reopenUntilOpen opens d after the session is back, or after onDenied. It ends when
// d is open or given up, or when the session is lost. When the session is back
// again, another call begins.
func (d *Device) reopenUntilOpen() {
	s := d.session
	if d.wasDenied() && s.features.Load()&rnbdwire.FeatureEvents != 0 && !s.pauseFor(eventDelay) {
		return
	}
	for tries := 0; d.goesOn(); tries++ {
		select {
		case s.turns <- struct{}{}:
		case <-s.done:
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), s.client.cfg.MapTimeout)
		err := d.tryReopen(ctx)
		cancel()
		<-s.turns
		if err != nil && !s.pauseFor(s.reopenPause(tries)) {
			return
		}
	}
}

// eventDelay bounds the delay of the event that a device was closed on the server
// by hand. Such a device is not opened again automatically.
const eventDelay = 300 * time.Millisecond

// goesOn reports whether d is still to be opened. If not, the reopening has
// ended.
func (d *Device) goesOn() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.reopening = d.state == Closed && !d.needsRemap && d.session.ready.Load()
	return d.reopening
}

// errUsersRemain keeps a device closed whose users have seen errors.
var errUsersRemain = errors.New("users have the device open")

// tryReopen tries once to open d again. After an error the caller tries again.
func (d *Device) tryReopen(ctx context.Context) error {
	if d.hasExpired() && d.hasUsers(ctx) {
		return errUsersRemain
	}
	defer d.session.awaitOpen(d)()
	return d.finishReopen(d.open(ctx))
}

func (d *Device) hasExpired() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.expired
}

// hasUsers reports whether users may have d open. Users of the library are not known.
func (d *Device) hasUsers(ctx context.Context) bool {
	fe := d.fe.Load()
	if fe == nil || !fe.hasProcess() {
		return true
	}
	return fe.deviceStatus(ctx, d).Openers > 0
}

// finishReopen ends a reopen. err is the result of its OPEN.
func (d *Device) finishReopen(err error) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.state != Closed || d.needsRemap {
		return nil // no caller waits for it; its unmap closes it on the server
	}
	if err == nil {
		err = d.openGate()
	}
	switch {
	case err == nil:
		return nil
	case isFinal(err):
		d.giveUp(err)
		return nil
	}
	if text := err.Error(); d.lastError != text && !d.expired {
		d.lastError = text
		d.log.Warn("device does not open again yet", "err", err)
	}
	return err
}

// isFinal reports whether err, of an OPEN after a reconnect, is a decision. Absence is
// none: a server may be back before its storage is mounted or attached, and then
// answers ENOENT, ENOTBLK or EINVAL.
func isFinal(err error) bool {
	for _, errno := range []error{syscall.EPERM, syscall.EACCES, errShrank, errOtherVolume, errChanged} {
		if errors.Is(err, errno) {
			return true
		}
	}
	return false
}

// openGate opens the gate of d. It fails if the session was lost after the answer to
// OPEN: the id is void then, and onLost may have come already, while d was not open.
// The caller holds mu.
func (d *Device) openGate() error {
	if d.openedIn != d.session.currentEpoch() {
		return errVoid
	}
	d.stopPatience()
	d.needsRemap, d.expired, d.deniedOpen, d.stopped = false, false, false, false
	if !d.failing { // an event that came before
		d.lastError = ""
	}
	d.setState(Open)
	d.setGate(gateOpen)
	if fe := d.fe.Load(); fe != nil {
		go fe.resizeDevice(d)
	}
	return nil
}
