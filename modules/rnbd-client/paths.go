package client

import (
	"context"
	"sync"

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
}

func (p *pathSpelling) note(a rtrs.PathAddr, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.words == nil {
		p.words = map[pathSpec]string{}
	}
	p.words[pathSpec{src: a.Src, dst: a.Dst, fabric: a.Device.Info().Fabric}] = text
}

// of spells the paths that are not removed. Without any it spells those of
// before: a session that nobody can open again is of no use.
func (p *pathSpelling) of(paths []rtrs.PathInfo) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var now []string
	for _, i := range paths {
		if i.State == rtrs.PathDead {
			continue
		}
		spec := pathSpec{src: i.Addr.Src, dst: i.Addr.Dst, fabric: i.Fabric}
		text, ok := p.words[spec]
		if !ok {
			text = spec.String()
		}
		now = append(now, text)
	}
	if len(now) > 0 {
		p.last = now
	}
	return p.last
}

// savedPaths are the paths for the next daemon.
func (s *session) savedPaths() []string { return s.spelling.of(s.transport.Paths()) }

// addPath connects one more path, which users wrote as text, and returns its
// id. The next daemon will have it too.
func (s *session) addPath(ctx context.Context, text string, addr rtrs.PathAddr) (id int, err error) {
	s.spelling.note(addr, text)
	if id, err = s.transport.AddPath(ctx, addr); err == nil {
		s.client.pathsChanged()
	}
	return id, err
}

// removePath ends a path for good: for the next daemon, too.
func (s *session) removePath(ctx context.Context, id int) error {
	err := s.transport.RemovePath(ctx, id)
	if err == nil {
		s.client.pathsChanged()
	}
	return err
}

func (c *Client) pathsChanged() {
	c.mapMu.Lock()
	defer c.mapMu.Unlock()
	c.save()
}
