package rtrs

import (
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"
)

// When a path may join a session with chunks in use.
//
// A client uses a chunk again in three cases:
//
//   - its request was answered;
//   - its request's path was lost: it repeats the request on another path, with
//     the same contents;
//   - all paths were lost: it sends a different request. The kernel's client does
//     so on the next path that it connects, without asking.
//
// In the third case an operation may still run in that chunk. A late write would
// take bytes of the new request to the disk, a late read would overwrite them. To
// hold the new request does not help: its data are in the chunk before the server
// sees it.
//
// So a path is connected only when no client can have given up a chunk with a
// running operation:
//
//   - no operation of another path runs, or
//   - another path is connected, and its client has answered a heartbeat on it
//     that was sent after the INFO_REQ of the joining path. Then that path has
//     been there since the operations began, so the client has not lost all its
//     paths. For operations older than that path, the same was shown when it
//     joined.
//
// Else the path waits with its INFO_RSP. If an operation is retired meanwhile
// and no path is left that could vouch, the session loses its chunk. The path
// is closed and ends the session; the client gets a new session with memory
// of its own.

// pathJoin is a path that waits for the chunks of its session.
type pathJoin struct {
	path  *srvPath
	asked map[*srvPath]bool

	mu      sync.Mutex
	vouched []*srvPath
}

// awaitChunks returns nil when p may be connected.
func (s *SrvSession) awaitChunks(p *srvPath) error {
	j := &pathJoin{path: p, asked: map[*srvPath]bool{}}
	for {
		changed := s.changed.nextRing()
		if done, err := j.mayJoin(); done || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-p.closing:
			return p.cause
		}
	}
}

// mayJoin reports whether the path may be connected now.
func (j *pathJoin) mayJoin() (done bool, err error) {
	s := j.path.sess
	if s.allIdle() || j.vouchedFor() {
		return true, nil
	}
	others := s.connectedPaths()
	for _, w := range others {
		if !j.asked[w] {
			j.asked[w] = true
			j.askForBeat(w)
		}
	}
	if n := s.Retired(); n > 0 && len(others) == 0 {
		return false, fmt.Errorf("the session has %d chunks whose requests do not end: %w", n, syscall.EBUSY)
	}
	return false, nil
}

// askForBeat sends a heartbeat on w. Its answer vouches for the path. A client that has
// lost w without the server's notice does not answer, and w ends soon.
func (j *pathJoin) askForBeat(w *srvPath) {
	c := w.conns[0]
	c.poller.Do(func() {
		if c.down {
			return
		}
		w.probePeer(time.Now())
		w.hb.askPeer(c.conn, func() {
			j.mu.Lock()
			j.vouched = append(j.vouched, w)
			j.mu.Unlock()
			w.sess.changed.ringAll()
		})
	})
}

// vouchedFor reports whether a path that has vouched is still connected.
func (j *pathJoin) vouchedFor() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.ContainsFunc(j.vouched, (*srvPath).isConnected)
}

// allIdle reports whether no operation runs in any chunk.
func (s *SrvSession) allIdle() bool {
	for i := range s.ops {
		if s.ops[i].owner.Load() != 0 {
			return false
		}
	}
	return true
}

// connectedPaths returns the paths that are connected.
func (s *SrvSession) connectedPaths() []*srvPath {
	s.srv.mu.Lock()
	defer s.srv.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.paths), func(p *srvPath) bool { return !p.isConnected() })
}

// changeBell wakes all callers that wait for the next change.
type changeBell struct {
	mu sync.Mutex
	ch chan struct{} // nil: no caller waits
}

// nextRing is closed by the next ring.
func (b *changeBell) nextRing() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

func (b *changeBell) ringAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}
