package client

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// pages answers LIST with names, as many as fit into small pages.
func pages(names []string) func(after string, page []byte) int {
	return func(after string, mem []byte) int {
		page, flags := rnbdwire.NewListPage(mem[:rnbdwire.ListRspMin]), uint32(0)
		for _, n := range names {
			if n > after && !page.Add(rnbdwire.ListEntry{Name: n, Sectors: 8, User: strings.Repeat("u", 200)}) {
				flags = rnbdwire.ListMore
				break
			}
		}
		page.Finish(flags)
		return 0
	}
}

func TestE031_E033_DiscoverTakesAllPages(t *testing.T) {
	s := newTarget(t, 1<<20)
	var names []string
	for n := range 100 {
		names = append(names, fmt.Sprintf("vol%03d", n))
	}
	s.features, s.onList = rnbdwire.FeatureList, pages(names)
	c := s.newClient()
	o, err := c.Discover(t.Context(), []string{"10.0.0.1", "10.0.1.1"}, "")
	must(t, err)
	var got []string
	for _, e := range o.Exports {
		got = append(got, e.Name)
	}
	if !slices.Equal(got, names) || o.Exports[0].Size != 4096 || o.Cut || o.Paths {
		t.Errorf("it is %q, %+v", got, o.Exports[0])
	}
	eventually(t, "the server has no session", func() bool { return s.sessions.Load() == 0 })
}

func TestE031_AServerWithoutListsIsNotAsked(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.onList = func(string, []byte) int { t.Error("it was asked"); return 0 }
	if _, err := s.newClient().Discover(t.Context(), []string{"10.0.0.1"}, ""); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("it gives %v", err)
	}
}

func TestE033_PagesThatMakeNoSenseAreRefused(t *testing.T) {
	entry := func(name string, sectors uint64) rnbdwire.ListEntry {
		return rnbdwire.ListEntry{Name: name, Sectors: sectors}
	}
	for name, c := range map[string]struct {
		entries []rnbdwire.ListEntry
		flags   uint32
		spoil   bool
	}{
		"out of order":       {[]rnbdwire.ListEntry{entry("b", 1), entry("a", 1)}, 0, false},
		"the same for ever":  {[]rnbdwire.ListEntry{entry("a", 1)}, rnbdwire.ListMore, false},
		"empty for ever":     {nil, rnbdwire.ListMore, false},
		"an impossible size": {[]rnbdwire.ListEntry{entry("a", 1<<63)}, 0, false},
		"more than there is": {nil, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			s.features, s.onList = rnbdwire.FeatureList, func(_ string, mem []byte) int {
				page := rnbdwire.NewListPage(mem)
				for _, e := range c.entries {
					page.Add(e)
				}
				page.Finish(c.flags)
				if c.spoil {
					mem[4] = 200
				}
				return 0
			}
			if _, err := s.newClient().Discover(t.Context(), []string{"10.0.0.1"}, ""); !errors.Is(err, syscall.EPROTO) {
				t.Errorf("it gives %v", err)
			}
		})
	}
	s := newTarget(t, 1<<20)
	s.features, s.onList = rnbdwire.FeatureList, func(string, []byte) int { return int(syscall.ETIMEDOUT) }
	if _, err := s.newClient().Discover(t.Context(), []string{"10.0.0.1"}, ""); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("an errno of the server: %v", err)
	}
}

func TestProbeTellsWhatAPathIsLike(t *testing.T) {
	s := newTarget(t, 1<<20)
	p, err := s.newClient().Probe(t.Context(), "10.0.0.1", 10)
	must(t, err)
	if p.Fabric != "loopback" || p.Version != 2 || p.Features != 0 || p.QueueDepth != s.depth || len(p.Latency) != 10 || p.Median() <= 0 || p.MaxIO < 4096 {
		t.Errorf("it is %+v", p)
	}
	eventually(t, "the server has no session", func() bool { return s.sessions.Load() == 0 })
	if _, err := s.newClient().Probe(t.Context(), "10.0.9.9", 1); err == nil {
		t.Error("a server that is not there answers")
	}
}
