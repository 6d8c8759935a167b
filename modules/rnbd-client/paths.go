package client

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// Paths come and go while a session lives. The next daemon gets those that are
// there at the end, as users wrote them: a path without a fabric may take
// another one then.

// pathSpelling is what users wrote for the paths of a session.
type pathSpelling struct {
	mu    sync.Mutex
	words map[pathSpec]string // by the path with its fabric
	last  []string            // told
	// missing are paths of the last daemon that are not connected yet.
	missing []rtrs.PathAddr
}

func (p *pathSpelling) note(a rtrs.PathAddr, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.words == nil {
		p.words = map[pathSpec]string{}
	}
	p.words[specOf(a)] = text
}

// miss replaces the list of paths that are to come.
func (p *pathSpelling) miss(addrs []rtrs.PathAddr) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.missing = slices.Clone(addrs)
}

// of spells the paths that are not removed, or are to come. Without any it spells those of
// before: a session that nobody can open again is of no use.
func (p *pathSpelling) of(paths []rtrs.PathInfo) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var now []string
	for _, i := range paths {
		if i.State == rtrs.PathDead {
			continue
		}
		now = append(now, p.spell(pathSpec{src: i.Addr.Src, dst: i.Addr.Dst, fabric: i.Fabric}))
	}
	for _, a := range p.missing {
		if text := p.spell(specOf(a)); !slices.Contains(now, text) {
			now = append(now, text)
		}
	}
	if len(now) > 0 {
		p.last = now
	}
	return p.last
}

// spell is called with mu held.
func (p *pathSpelling) spell(spec pathSpec) string {
	if text, ok := p.words[spec]; ok {
		return text
	}
	return spec.String()
}

func specOf(a rtrs.PathAddr) pathSpec {
	return pathSpec{src: a.Src, dst: a.Dst, fabric: a.Device.Info().Fabric}
}

// savedPaths are the paths for the next daemon.
func (s *session) savedPaths() []string { return s.spelling.of(s.transport.Paths()) }

// addPath connects one more path, which users wrote as text, and returns its
// id. The next daemon will have it too.
func (s *session) addPath(ctx context.Context, text string, addr rtrs.PathAddr) (id int, err error) {
	s.spelling.note(addr, text)
	if id, err = s.transport.AddPath(ctx, addr); err == nil {
		s.client.sessionChanged()
	}
	return id, err
}

// removePath ends a path for good: for the next daemon, too.
func (s *session) removePath(ctx context.Context, id int) error {
	err := s.transport.RemovePath(ctx, id)
	if err == nil {
		s.client.sessionChanged()
	}
	return err
}

// sessionChanged writes down what was changed on a session: at once, or after the
// map under way, which may wait for its server for long.
func (c *Client) sessionChanged() {
	save := func() {
		defer c.mapMu.Unlock()
		c.save()
	}
	if c.mapMu.TryLock() {
		save()
		return
	}
	go func() {
		c.mapMu.Lock()
		save()
	}()
}

// openAny connects a session with the first path that works, for disks whose
// users wait already. missing are the others.
func openAny(ctx context.Context, name string, addrs []rtrs.PathAddr, cfg rtrs.ClientConfig) (s *rtrs.Session, missing []rtrs.PathAddr, err error) {
	if len(addrs) < 2 {
		s, err = rtrs.Open(ctx, name, addrs, cfg)
		return s, nil, err
	}
	var errs []error
	for i, a := range addrs {
		try, cancel := shareOf(ctx, len(addrs)-i+1) // one share is for what follows
		s, err := rtrs.Open(try, name, addrs[i:i+1], cfg)
		cancel()
		if err == nil {
			return s, slices.DeleteFunc(slices.Clone(addrs), func(other rtrs.PathAddr) bool { return specOf(other) == specOf(a) }), nil
		}
		errs = append(errs, err)
	}
	return nil, nil, fmt.Errorf("none of %d paths works: %w", len(addrs), errors.Join(errs...))
}

// shareOf is ctx with one of n equal parts of its time.
func shareOf(ctx context.Context, n int) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, time.Until(end)/time.Duration(n))
}

// addMissing adds paths of the last daemon as soon as they work, until the
// session ends.
func (s *session) addMissing(addrs []rtrs.PathAddr) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		<-s.done
		cancel()
	}()
	warned := map[pathSpec]bool{}
	for pause := restorePause; ctx.Err() == nil; pause = min(2*pause, maxRestorePause) {
		addrs = slices.DeleteFunc(addrs, func(a rtrs.PathAddr) bool {
			err := s.addMissingPath(ctx, a)
			if err != nil && !warned[specOf(a)] && ctx.Err() == nil {
				warned[specOf(a)] = true
				s.log.Warn("a path of the last daemon does not connect yet", "path", specOf(a).String(), "error", err)
			}
			return err == nil
		})
		s.spelling.miss(addrs)
		if len(addrs) == 0 {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

func (s *session) addMissingPath(ctx context.Context, a rtrs.PathAddr) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err := s.transport.AddPath(ctx, a)
	if errors.Is(err, syscall.EEXIST) { // added by hand
		return nil
	}
	if err == nil {
		s.log.Info("path of the last daemon is back", "path", specOf(a).String())
	}
	return err
}
