package client

import (
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// remindAfter is the pause between two warnings of the same loss.
const remindAfter = 10 * time.Minute

// redundancy warns when a session of several paths has lost some of them: once,
// and again every remindAfter until all are back.
type redundancy struct {
	log *slog.Logger

	mu     sync.Mutex
	on     bool      // from begin to end
	since  time.Time // of the loss; zero: all paths work
	last   string    // what is lost, as of the last look
	remind *time.Timer
}

// begin starts the warnings: the session is open, with those paths.
func (r *redundancy) begin(paths []rtrs.PathInfo) {
	r.mu.Lock()
	r.on = true
	r.mu.Unlock()
	r.look(paths)
}

// look compares the paths with what they were.
func (r *redundancy) look(paths []rtrs.PathInfo) {
	up, down := sortPaths(paths)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case !r.on:
	case up == len(paths) && !r.since.IsZero():
		r.log.Info("all paths are connected again", "paths", up, "after", time.Since(r.since).Round(time.Second).String())
		r.since = time.Time{}
		r.remind.Stop()
	case up == 0 || len(down) == 0:
		// The loss of the last path is another warning, and paths that are
		// connecting have not failed.
	case r.since.IsZero():
		r.since = time.Now()
		r.last = strings.Join(down, ", ")
		r.log.Warn("redundancy is lost: paths are down", "down", r.last, "left", up, "of", len(paths))
		r.remind = time.AfterFunc(remindAfter, r.again)
	default:
		r.last = strings.Join(down, ", ")
	}
}

// again warns of a loss that lasts.
func (r *redundancy) again() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.on || r.since.IsZero() {
		return
	}
	r.log.Warn("redundancy is still lost: paths are down", "down", r.last, "since", r.since.UTC().Format(time.RFC3339))
	r.remind.Reset(remindAfter)
}

// end stops the warnings.
func (r *redundancy) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.on = false
	if r.remind != nil {
		r.remind.Stop()
	}
}

// sortPaths counts the paths that are connected, and describes those that are
// lost: the others have not been tried to their end.
func sortPaths(paths []rtrs.PathInfo) (up int, down []string) {
	for _, p := range paths {
		switch p.State {
		case rtrs.PathConnected:
			up++
		case rtrs.PathConnectingErr, rtrs.PathReconnecting:
			down = append(down, describeLoss(p))
		case rtrs.PathClosed:
			if p.Err != nil { // else by hand
				down = append(down, describeLoss(p))
			}
		}
	}
	return up, down
}

// describeLoss names a path and why it is not connected.
func describeLoss(p rtrs.PathInfo) string {
	why := "disconnected by hand"
	if p.Err != nil {
		why = rootCause(p.Err).Error()
	}
	return fmt.Sprintf("%s%%%s (%s)", verbs.AddrPortString(p.Addr.Dst), p.Fabric, why)
}
