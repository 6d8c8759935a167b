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

// pathWatch warns when a session of several paths has lost some of them, and
// again every remindAfter until all are back.
type pathWatch struct {
	log *slog.Logger

	mu     sync.Mutex
	on     bool      // from begin to end
	since  time.Time // time of the loss; zero: all paths work
	last   string    // lost paths at the last look
	remind *time.Timer
}

// startWatch starts the warnings. paths are those of the open session.
func (r *pathWatch) startWatch(paths []rtrs.PathInfo) {
	r.mu.Lock()
	r.on = true
	r.mu.Unlock()
	r.comparePaths(paths)
}

// comparePaths compares the paths with those of the last look.
func (r *pathWatch) comparePaths(paths []rtrs.PathInfo) {
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
		// The loss of the last path has its own warning, and paths that are
		// connecting have not failed.
	case r.since.IsZero():
		r.since = time.Now()
		r.last = strings.Join(down, ", ")
		r.log.Warn("redundancy is lost: paths are down", "down", r.last, "left", up, "of", len(paths))
		r.remind = time.AfterFunc(remindAfter, r.repeatWarning)
	default:
		r.last = strings.Join(down, ", ")
	}
}

// repeatWarning repeats the warning of a loss that lasts.
func (r *pathWatch) repeatWarning() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.on || r.since.IsZero() {
		return
	}
	r.log.Warn("redundancy is still lost: paths are down", "down", r.last, "since", r.since.UTC().Format(time.RFC3339))
	r.remind.Reset(remindAfter)
}

// stopWatch stops the warnings.
func (r *pathWatch) stopWatch() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.on = false
	if r.remind != nil {
		r.remind.Stop()
	}
}

// sortPaths counts the connected paths and describes the lost ones. Paths that
// are connecting for the first time, or were disconnected by hand, are neither.
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

// describeLoss describes a path and the reason why it is not connected.
func describeLoss(p rtrs.PathInfo) string {
	why := "disconnected by hand"
	if p.Err != nil {
		why = rootCause(p.Err).Error()
	}
	return fmt.Sprintf("%s%%%s (%s)", verbs.AddrPortString(p.Addr.Dst), p.Fabric, why)
}

// lossReason describes the loss of the last path: time, paths and causes.
func lossReason(lost []rtrs.PathInfo) string {
	var paths []string
	for _, p := range lost {
		paths = append(paths, describeLoss(p))
	}
	return fmt.Sprintf("no path is left since %s: %s", time.Now().UTC().Format(time.RFC3339), strings.Join(paths, ", "))
}

// rootCause returns the last error in the chain of err that has a text.
func rootCause(err error) error {
	for {
		switch e := err.(type) {
		case interface{ Unwrap() error }:
			next := e.Unwrap()
			if next == nil {
				return err
			}
			err = next
		case interface{ Unwrap() []error }:
			all := e.Unwrap()
			if len(all) == 0 {
				return err
			}
			err = all[len(all)-1]
		default:
			return err
		}
	}
}

// pathText returns SRC@DST, or @DST before the system has chosen a source.
func pathText(p rtrs.PathInfo) string {
	dst := "@" + verbs.AddrString(p.Addr.Dst.Addr())
	if p.Src.IsValid() {
		return verbs.AddrString(p.Src) + dst
	}
	return dst
}
