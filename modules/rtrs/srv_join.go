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

// join is a path that waits for the chunks of its session.
type join struct {
	path  *srvPath
	asked map[*srvPath]bool

	mu      sync.Mutex
	vouched []*srvPath
}

// awaitChunks returns nil when p may be connected.
func (s *SrvSession) awaitChunks(p *srvPath) error {
	j := &join{path: p, asked: map[*srvPath]bool{}}
	for {
		changed := s.changed.next()
		if done, err := j.look(); done || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-p.closing:
			return p.cause
		}
	}
}

// look reports whether the path may be connected now.
func (j *join) look() (done bool, err error) {
	s := j.path.sess
	if s.idle() || j.vouchedFor() {
		return true, nil
	}
	others := s.connectedPaths()
	for _, w := range others {
		if !j.asked[w] {
			j.asked[w] = true
			j.ask(w)
		}
	}
	if n := s.Retired(); n > 0 && len(others) == 0 {
		return false, fmt.Errorf("the session has %d chunks whose requests do not end: %w", n, syscall.EBUSY)
	}
	return false, nil
}

// ask sends a heartbeat on w. Its answer vouches for the path. A client that has
// lost w without the server's notice does not answer, and w ends soon.
func (j *join) ask(w *srvPath) {
	c := w.conns[0]
	c.poller.Do(func() {
		if c.down {
			return
		}
		w.probe(time.Now())
		w.hb.ask(c.conn, func() {
			j.mu.Lock()
			j.vouched = append(j.vouched, w)
			j.mu.Unlock()
			w.sess.changed.ring()
		})
	})
}

// vouchedFor reports whether a path that has vouched is still connected.
func (j *join) vouchedFor() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.ContainsFunc(j.vouched, (*srvPath).connected)
}

// idle reports whether no operation runs in any chunk.
func (s *SrvSession) idle() bool {
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
	return slices.DeleteFunc(slices.Clone(s.paths), func(p *srvPath) bool { return !p.connected() })
}

// bell wakes all callers that wait for the next change.
type bell struct {
	mu sync.Mutex
	ch chan struct{} // nil: no caller waits
}

// next is closed by the next ring.
func (b *bell) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch == nil {
		b.ch = make(chan struct{})
	}
	return b.ch
}

func (b *bell) ring() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ch != nil {
		close(b.ch)
		b.ch = nil
	}
}
