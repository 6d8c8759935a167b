package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// Paths are added and removed while a session runs. The next daemon gets the
// paths at the end, as users wrote them: a path without a fabric may use
// another one then.

// pathSpelling has the text of the paths of a session, as users wrote it.
type pathSpelling struct {
	mu    sync.Mutex
	words map[mapline.Path]string // by the path with its fabric
	last  []string                // told
}

func (p *pathSpelling) note(a rtrs.PathAddr, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.words == nil {
		p.words = map[mapline.Path]string{}
	}
	p.words[specOf(a)] = text
}

// of returns the spellings of the paths that are not removed. If none is left
// it returns those before the last removal, so that the session can be opened
// again.
func (p *pathSpelling) of(paths []rtrs.PathInfo) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var now []string
	for _, i := range paths {
		if i.State == rtrs.PathDead {
			continue
		}
		if text := p.spell(mapline.Path{Src: i.Addr.Src, Dst: i.Addr.Dst, Fabric: i.Fabric}); !slices.Contains(now, text) {
			now = append(now, text)
		}
	}
	if len(now) > 0 {
		p.last = now
	}
	return p.last
}

// spell returns the user's text of a path. The caller holds mu.
func (p *pathSpelling) spell(spec mapline.Path) string {
	if text, ok := p.words[spec]; ok {
		return text
	}
	return spec.String()
}

func specOf(a rtrs.PathAddr) mapline.Path {
	return mapline.Path{Src: a.Src, Dst: a.Dst, Fabric: a.Device.Info().Fabric}
}

// savedPaths returns the paths for the next daemon.
func (s *session) savedPaths() []string { return s.spelling.of(s.transport.Paths()) }

// addPath connects another path and returns its id. text is the path as users
// wrote it. The next daemon uses it, too.
func (s *session) addPath(ctx context.Context, text string, addr rtrs.PathAddr) (id int, err error) {
	s.spelling.note(addr, text)
	if id, err = s.transport.AddPath(ctx, addr); err == nil {
		s.client.sessionChanged()
	}
	return id, err
}

// removePath ends a path for this daemon and the next one. The error is EBUSY
// for the last path, unless force is set.
func (s *session) removePath(ctx context.Context, id int, force bool) error {
	last, done := s.beginRemove(id)
	defer done()
	if last && !force {
		return fmt.Errorf("remove path %d of session %q: it is the last one, devices would be without a server; forced, it goes: %w", id, s.name, syscall.EBUSY)
	}
	err := s.transport.RemovePath(ctx, id)
	if err == nil {
		s.client.sessionChanged()
	}
	return err
}

// beginRemove reports whether the session has no other path than id and those
// that are being removed. done ends the removal.
func (s *session) beginRemove(id int) (last bool, done func()) {
	paths := s.transport.Paths()
	s.mu.Lock()
	defer s.mu.Unlock()
	last = true
	for _, p := range paths {
		last = last && (p.ID == id || p.State == rtrs.PathDead || s.removing[p.ID] > 0)
	}
	if s.removing == nil {
		s.removing = map[int]int{}
	}
	s.removing[id]++
	return last, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.removing[id]--; s.removing[id] == 0 {
			delete(s.removing, id)
		}
	}
}

// sessionChanged saves the state after a change of a session.
func (c *Client) sessionChanged() {
	c.unsaved.Store(true)
	c.flush()
}

// mapDone unlocks mapMu and then saves the state if it has changed.
func (c *Client) mapDone() {
	c.mapMu.Unlock()
	c.flush()
}

// flush writes the state file if something has changed since it was written. It
// returns when the caller's changes are in the file.
func (c *Client) flush() {
	if !c.unsaved.Load() {
		return
	}
	c.saving.Lock()
	defer c.saving.Unlock()
	if c.unsaved.Swap(false) {
		c.write()
	}
}

// openAny connects a session with the first path that works, for disks with
// users that wait already. Other paths may follow later.
func openAny(ctx context.Context, name string, addrs []rtrs.PathAddr, cfg rtrs.ClientConfig) (*rtrs.Session, error) {
	if len(addrs) < 2 {
		return rtrs.Open(ctx, name, addrs, cfg)
	}
	var errs []error
	for i := range addrs {
		try, cancel := shareOf(ctx, len(addrs)-i+1) // one share is for the rest of the open
		s, err := rtrs.Open(try, name, addrs[i:i+1], cfg)
		cancel()
		if err == nil {
			return addLater(ctx, s, slices.Delete(slices.Clone(addrs), i, i+1))
		}
		errs = append(errs, err)
	}
	return nil, fmt.Errorf("none of %d paths works: %w", len(addrs), errors.Join(errs...))
}

// addLater adds paths that may not work yet. It skips those that the session
// has already.
func addLater(ctx context.Context, s *rtrs.Session, addrs []rtrs.PathAddr) (*rtrs.Session, error) {
	for _, a := range addrs {
		if _, err := s.AddPathLater(a); err != nil && !errors.Is(err, syscall.EEXIST) {
			_ = s.Close(context.WithoutCancel(ctx))
			return nil, err
		}
	}
	return s, nil
}

// shareOf returns ctx with one of n equal parts of its time.
func shareOf(ctx context.Context, n int) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(end)/time.Duration(n))
}
