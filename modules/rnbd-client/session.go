package client

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// currentEpoch returns the number of the current epoch, from 1. An epoch ends with
// the loss of the last path. Answers of the server, such as ids of devices,
// are valid in their epoch only.
func (s *session) currentEpoch() uint64 { return s.downs.Load() + 1 }

var (
	errShrank = fmt.Errorf("smaller than before: %w", syscall.EIO)
	errVoid   = fmt.Errorf("the session was lost before it was open: %w", syscall.ECONNABORTED)
)

// wakeRun makes run check the devices.
func (s *session) wakeRun() {
	select {
	case s.signal <- struct{}{}:
	default:
	}
}

func (s *session) listDevices() []*Device {
	s.client.mu.Lock()
	defer s.client.mu.Unlock()
	return append([]*Device(nil), s.devices...)
}

func (s *session) close(ctx context.Context) error {
	close(s.done)
	s.redundancy.stopWatch()
	return s.transport.Close(ctx)
}

// pauseFor waits for d. It reports false if the session has been closed.
func (s *session) pauseFor(d time.Duration) bool {
	select {
	case <-s.done:
		return false
	case <-time.After(d):
		return true
	}
}

// maxIO returns the size of the largest request that the server takes now, in
// bytes. It is a whole number of pages.
func (s *session) maxIO() int { return min(s.transport.MaxIOSize(), maxIOSize) &^ 4095 }

// maxIOSize is the limit of the kernel's client: 128 pages.
const maxIOSize = 128 * 4096

// serverAddress returns the address of the server on the first path of s.
func (s *session) serverAddress() string {
	for _, p := range s.transport.Paths() {
		return verbs.AddrPortString(p.Addr.Dst)
	}
	return "of session " + s.name
}
