package client

import (
	"slices"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// pathSpelling has the text of the paths of a session, as users wrote it.
type pathSpelling struct {
	mu    sync.Mutex
	words map[mapline.Path]string // by the path with its fabric
	last  []string                // told
}

func (p *pathSpelling) noteSpelling(a rtrs.PathAddr, text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.words == nil {
		p.words = map[mapline.Path]string{}
	}
	p.words[specOf(a)] = text
}

// spellingsOf returns the spellings of the paths that are not removed. If none is left
// it returns those before the last removal, so that the session can be opened
// again.
func (p *pathSpelling) spellingsOf(paths []rtrs.PathInfo) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var now []string
	for _, i := range paths {
		if i.State == rtrs.PathDead {
			continue
		}
		if text := p.userText(mapline.Path{Src: i.Addr.Src, Dst: i.Addr.Dst, Fabric: i.Fabric}); !slices.Contains(now, text) {
			now = append(now, text)
		}
	}
	if len(now) > 0 {
		p.last = now
	}
	return p.last
}

// userText returns the user's text of a path. The caller holds mu.
func (p *pathSpelling) userText(spec mapline.Path) string {
	if text, ok := p.words[spec]; ok {
		return text
	}
	return spec.String()
}

func specOf(a rtrs.PathAddr) mapline.Path {
	return mapline.Path{Src: a.Src, Dst: a.Dst, Fabric: a.Device.Info().Fabric}
}
