package server

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// list sends a LIST with a reply of size bytes.
func (i *initiator) list(after string, size int) (rnbdwire.ListRsp, error) {
	i.t.Helper()
	msg := make([]byte, rnbdwire.ListSize)
	must(i.t, rnbdwire.ListFields{After: after}.Put(msg))
	rsp := make(rnbdwire.ListRsp, size)
	return rsp, i.session.AdminRead(i.ctx(), msg, rsp)
}

// names asks for all pages.
func (i *initiator) names(size int) (names []string, pages int) {
	i.t.Helper()
	for after, more := "", true; more; pages++ {
		rsp, err := i.list(after, size)
		must(i.t, err)
		entries, err := rsp.Entries()
		must(i.t, err)
		for _, e := range entries {
			names = append(names, e.Name)
			after = e.Name
		}
		more = rsp.Flags()&rnbdwire.ListMore != 0
	}
	return names, pages
}

// searchPath is a folder with files of 4096 bytes.
func searchPath(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		path := filepath.Join(dir, name)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, make([]byte, 4096), 0o600))
	}
	return dir
}

func TestE031_ListIsAnnouncedUnlessItIsOff(t *testing.T) {
	dir := searchPath(t, "vol")
	for _, on := range []bool{true, false} {
		i := newRig(t, newMemory(), func(c *Config) { c.SearchPath, c.List = dir, on }).connect("s")
		rsp, err := i.sessInfo(2)
		must(t, err)
		if got := rsp.Features()&rnbdwire.FeatureList != 0; got != on {
			t.Errorf("on %t: announced %t", on, got)
		}
		if _, err := i.list("", 4096); on && err != nil || !on && !errors.Is(err, syscall.EINVAL) {
			t.Errorf("on %t: %v", on, err)
		}
	}
}

func TestE032_ListsOfWrongLengthsAreRefused(t *testing.T) {
	dir := searchPath(t, "vol")
	i := newRig(t, newMemory(), func(c *Config) { c.SearchPath = dir }).connect("s")
	for _, size := range []int{36, 4095, rnbdwire.ListRspMax + 1} {
		if _, err := i.list("", size); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("a reply of %d bytes: %v", size, err)
		}
	}
	msg := make([]byte, rnbdwire.ListSize)
	must(t, rnbdwire.ListFields{}.Put(msg))
	for _, bad := range [][]byte{msg[:rnbdwire.ListSize-1], append(msg[:8:8], []byte(strings.Repeat("x", rnbdwire.NameSize+1))...)} {
		if err := i.session.AdminRead(i.ctx(), bad, make([]byte, 4096)); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("a message of %d bytes: %v", len(bad), err)
		}
	}
	if _, err := i.list("", rnbdwire.ListRspMax); err != nil {
		t.Errorf("the longest reply: %v", err)
	}
}

func TestE033_NamesBelowTheSearchPathAreListed(t *testing.T) {
	dir := searchPath(t, "b.img", "a.img", "vg0/lv1", "vg0/.hidden", ".git/config", "a..b")
	outside := searchPath(t, "secret")
	must(t, os.Symlink("a.img", filepath.Join(dir, "link")))
	must(t, os.Symlink("/vg0/lv1", filepath.Join(dir, "rooted")))
	must(t, os.Symlink(filepath.Join(outside, "secret"), filepath.Join(dir, "escape")))
	must(t, os.Symlink(outside, filepath.Join(dir, "away")))
	must(t, os.Symlink(".", filepath.Join(dir, "loop")))
	must(t, syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600))
	must(t, os.MkdirAll(filepath.Join(dir, strings.Repeat("d/", maxListDepth+1)), 0o755))

	mem := newMemory()
	mem.names = plugin.NamesPath
	mem.add("a.img", 4096)
	mem.add("b.img", 4096)
	r := newRig(t, mem, func(c *Config) { c.SearchPath, c.Rules = dir, nil })
	i, reader := r.connect("web"), r.connect("reader")
	_, err := i.open("a.img", blk.ReadWrite)
	must(t, err)
	for _, name := range []string{"a.img", "b.img"} {
		_, err = reader.open(name, blk.ReadOnly)
		must(t, err)
	}
	rsp, err := i.list("", 4096)
	must(t, err)
	entries, err := rsp.Entries()
	must(t, err)
	a := rnbdwire.ListEntry{Sectors: 8, Readers: 1, Writers: 1, Name: "a.img", User: "web"}
	b := rnbdwire.ListEntry{Sectors: 8, Readers: 1, Name: "b.img", User: "reader"}
	link := a
	link.Name = "link"
	want := []rnbdwire.ListEntry{a, b, link, {Sectors: 8, Name: "rooted"}, {Sectors: 8, Name: "vg0/lv1"}}
	if !slices.Equal(entries, want) {
		t.Errorf("listed are\n%+v, want\n%+v", entries, want)
	}
	if rsp.Flags() != rnbdwire.ListCut { // folders below each other
		t.Errorf("flags %d", rsp.Flags())
	}
}

func TestE033_PagesFollowEachOther(t *testing.T) {
	var want []string
	for n := range 300 {
		want = append(want, fmt.Sprintf("folder%d/volume-%03d", n%3, n))
	}
	dir := searchPath(t, want...)
	i := newRig(t, newMemory(), func(c *Config) { c.SearchPath = dir }).connect("s")
	slices.Sort(want)
	for _, size := range []int{4096, 8192, rnbdwire.ListRspMax} {
		names, pages := i.names(size)
		if !slices.Equal(names, want) || pages < 2 && size == 4096 || pages > 1 && size == rnbdwire.ListRspMax {
			t.Errorf("replies of %d bytes: %d names on %d pages", size, len(names), pages)
		}
	}
	rsp, err := i.list("folder1/volume-0", 4096) // a name that is not there
	must(t, err)
	if e, err := rsp.Entries(); err != nil || e[0].Name != "folder1/volume-001" {
		t.Errorf("behind a name that has gone: %v, %v", e, err)
	}
}

func TestE034_WhatIsNotServedIsNotListed(t *testing.T) {
	i := newRig(t, newMemory()).connect("s")
	rsp, err := i.list("", 4096)
	must(t, err)
	if e, err := rsp.Entries(); err != nil || len(e) > 0 || rsp.Flags() != rnbdwire.ListUnsearched {
		t.Errorf("without a search path: %v, flags %d, %v", e, rsp.Flags(), err)
	}
	dir := searchPath(t, "s1/vol", "s2/other", "loose")
	r := newRig(t, newMemory(), func(c *Config) { c.SearchPath = dir + "/%SESSNAME%" })
	for session, want := range map[string][]string{"s1": {"vol"}, "s2": {"other"}, "s3": nil} {
		if names, _ := r.connect(session).names(4096); !slices.Equal(names, want) {
			t.Errorf("session %s is told of %q, want %q", session, names, want)
		}
	}
}

func TestE034_AListHasBounds(t *testing.T) {
	dir := searchPath(t, "a", "b", ".c", "d", "e/f")
	for _, c := range []struct {
		names, looked, want int
		cut                 bool
	}{{10, 10, 4, false}, {5, 10, 4, false}, {2, 10, 2, true}, {10, 3, 3, true}} {
		root, err := os.Open(dir)
		must(t, err)
		w := nameWalk{ctx: t.Context(), root: root, maxNames: c.names, maxLooked: c.looked}
		w.addFolder("", 0)
		root.Close()
		if len(w.names) > c.want || w.cut != c.cut {
			t.Errorf("%+v: %q, cut %t", c, w.names, w.cut)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := (jail{searchPath: dir}).listNames(ctx, "s"); !errors.Is(err, syscall.ETIMEDOUT) {
		t.Errorf("without time: %v", err)
	}
}

// One LIST of a session at a time, and as many of all sessions as there are places.
func TestE034_ListsAreBounded(t *testing.T) {
	dir := searchPath(t, "vol")
	r := newRig(t, newMemory(), func(c *Config) { c.SearchPath = dir })
	i := r.connect("s")
	_, err := i.sessInfo(2)
	must(t, err)
	sess, err := r.server.sessionByName("s")
	must(t, err)
	sess.listing.Store(true)
	if _, err := i.list("", 4096); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("a second LIST of the session: %v", err)
	}
	sess.listing.Store(false)
	if _, err := i.list("", 4096); err != nil {
		t.Error(err)
	}
}

func TestE034_WhatTheRulesForbidIsNotListed(t *testing.T) {
	dir := searchPath(t, "a/disk", "b/disk", "c/disk")
	r := newRig(t, newMemory(), func(c *Config) {
		c.SearchPath = dir
		c.Access = accessRules(t,
			access.Rule{Session: []string{"alice"}, Device: []string{"a/*"}, Allow: "rw"},
			access.Rule{Device: []string{"b/*"}, Allow: "ro"})
	})
	for session, want := range map[string][]string{"alice": {"a/disk", "b/disk"}, "bob": {"b/disk"}} {
		if names, _ := r.connect(session).names(4096); !slices.Equal(names, want) {
			t.Errorf("session %s is told of %q, want %q", session, names, want)
		}
	}
}

// A plugin of opaque names lists those of its disks: the ones that the rules lead to it,
// that OPEN can take, and that the client may open, among the names of files.
func TestList_NamesOfAPlugin(t *testing.T) {
	mem := newMemory()
	mem.add("pool/a", 1<<20)
	mem.listed = []plugin.ListedName{
		{Name: "pool/b", Size: 8192}, {Name: "pool/a", Size: 1 << 20}, {Name: "pool/c"}, {Name: "elsewhere", Size: 512},
		{Name: ""}, {Name: "pool/../x"}, {Name: "pool/" + strings.Repeat("n", 255)}, {Name: "pool/b", Size: 8192},
	}
	rules, err := access.New([]access.Rule{{Device: []string{"pool/c"}, Allow: "none"}, {Allow: "rw"}})
	must(t, err)
	r := newRig(t, mem, func(c *Config) {
		c.SearchPath, c.Access = searchPath(t, "file", "zoo"), rules
		c.Rules = []Rule{{Glob: "pool/*", Plugin: "memory"}}
	})
	i := r.connect("s")
	if _, err := i.open("pool/a", blk.ReadWrite); err != nil {
		t.Fatal(err)
	}
	rsp, err := i.list("", 4096)
	must(t, err)
	entries, err := rsp.Entries()
	must(t, err)
	var got []string
	for _, e := range entries {
		got = append(got, fmt.Sprint(e.Name, " ", e.Sectors, " ", e.Writers))
	}
	if want := []string{"file 8 0", "pool/a 2048 1", "pool/b 16 0", "zoo 8 0"}; !slices.Equal(got, want) {
		t.Errorf("listed %q, want %q", got, want)
	}
}
