package confine

import (
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestConfigsThatAreRefused(t *testing.T) {
	launcher := []string{"/bin/true"}
	for _, c := range []struct {
		name string
		c    Config
		says string // empty: it is right
	}{
		{"zero value", Config{}, ""},
		{"off", Config{Mode: Off}, ""},
		{"try", Config{Mode: Try, Launcher: launcher}, ""},
		{"no launcher", Config{Mode: Try}, "needs a launcher"},
		{"a user without confinement", Config{Mode: Off, User: "root"}, "only with confinement"},
		{"a user that is not there", Config{Mode: Try, Launcher: launcher, User: "no-such-user"}, "no-such-user"},
		{"a word", Config{Mode: Try, Launcher: launcher, Allow: map[string][]string{"x": {"everything"}}}, `"everything"`},
		{"the root", Config{Mode: Try, Launcher: launcher, Allow: map[string][]string{"x": {"/"}}}, `"/"`},
		{"a relative path", Config{Mode: Try, Launcher: launcher, Allow: map[string][]string{"x": {"srv"}}}, `"srv"`},
		{"what can be allowed", Config{Mode: Try, Launcher: launcher, Allow: map[string][]string{"x": {"network", "disks", "none", "/srv"}}}, ""},
	} {
		err := c.c.Check()
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	for _, s := range []string{"", "x", "=network", "x="} {
		if m, err := ParseAllow([]string{s}); err == nil || !strings.Contains(err.Error(), "NAME=WHAT") {
			t.Errorf("%q: %v, %v", s, m, err)
		}
	}
	got, err := ParseAllow([]string{"a=network", "b=/x=y", "a=/srv"})
	if want := map[string][]string{"a": {"network", "/srv"}, "b": {"/x=y"}}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	if m, err := ParseMode("yes"); err == nil || !strings.Contains(err.Error(), `"yes"`) {
		t.Errorf("%v, %v", m, err)
	}
}

// What a kind of plugin keeps.
func TestProfiles(t *testing.T) {
	root := t.TempDir()
	absent := filepath.Join(root, "a", "b")
	all := Config{Mode: Strict, Launcher: []string{"x"}, Allow: map[string][]string{
		"net": {AllowNetwork}, "programs": {AllowPrograms}, "disks": {AllowDisks}, "none": {AllowNone}, "path": {"/srv/more"},
	}}
	caps := func(p *Profile, c int) bool { return slices.Contains(p.Caps, c) }
	storage := func(name, root string, later bool) *Profile {
		t.Helper()
		p, err := all.Storage(name, root, later)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	front := func(name string, disks bool) *Profile {
		t.Helper()
		p, err := all.Frontend(name, disks)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	if got, want := storage("x", root, false).Files, []Rule{{root, Write, true}}; !reflect.DeepEqual(got, want) {
		t.Errorf("a search path: %v", got)
	}
	if got, want := storage("x", "", false).Files, []Rule{{"/dev", Write, false}}; !reflect.DeepEqual(got, want) {
		t.Errorf("no search path: %v", got)
	}
	if got, want := storage("x", absent, true).Files, []Rule{{root, Write, true}}; !reflect.DeepEqual(got, want) {
		t.Errorf("a search path that comes later: %v", got)
	}
	if got := storage("path", root, false).Files; !slices.Contains(got, Rule{"/srv/more", Write, true}) {
		t.Errorf("one more path: %v", got)
	}
	p := storage("x", root, false)
	if !p.Strict || !p.URing || p.Network || p.Disks || caps(p, unix.CAP_SYS_ADMIN) || caps(p, unix.CAP_NET_ADMIN) {
		t.Errorf("a storage plugin: %+v", p)
	}
	if p := front("x", false); p.URing || p.Disks || p.Network || len(p.Files) > 0 || caps(p, unix.CAP_DAC_OVERRIDE) || caps(p, unix.CAP_SYS_ADMIN) || !p.netAdmin() {
		t.Errorf("a front end: %+v", p)
	}
	if p := front("net", false); !p.Network || !p.URing || caps(p, unix.CAP_NET_ADMIN) {
		t.Errorf("a front end with the host's network: %+v", p)
	}
	for _, p := range []*Profile{front("x", true), front("disks", false)} {
		if !p.Disks || !p.URing || !caps(p, unix.CAP_SYS_ADMIN) || p.netAdmin() {
			t.Errorf("a front end that shows disks: %+v", p)
		}
	}
	if p := front("none", true); p.Disks || caps(p, unix.CAP_SYS_ADMIN) {
		t.Errorf("one that may not: %+v", p)
	}
	if p := storage("programs", root, false); !p.Programs || p.Network || !slices.Contains(p.Files, Rule{"/usr", Run, false}) {
		t.Errorf("one that starts programs: %+v", p)
	}
	for _, off := range []Config{{}, {Mode: Off}} {
		s, err1 := off.Storage("x", root, false)
		f, err2 := off.Frontend("x", true)
		if s != nil || f != nil || err1 != nil || err2 != nil {
			t.Errorf("not confined: %v %v %v %v", s, f, err1, err2)
		}
	}
}

func TestProfileOfAnotherUser(t *testing.T) {
	c := Config{Mode: Try, Launcher: []string{"x"}, User: "nobody"}
	p, err := c.Storage("x", t.TempDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	if p.User == nil || p.User.UID == 0 || slices.Contains(p.Caps, unix.CAP_DAC_OVERRIDE) {
		t.Errorf("%+v", p)
	}
	c.User = "65534" // by number
	if _, err := c.Storage("x", t.TempDir(), false); err != nil {
		t.Error(err)
	}
	if u, err := LookUp("0"); err != nil || u.UID != 0 || u.Name != "root" {
		t.Errorf("%+v, %v", u, err)
	}
}

// The variables that name folders of measurements open them, and nothing else does.
func TestCommonRules(t *testing.T) {
	own := func() (paths []string) {
		for _, r := range CommonRules("/sockets") {
			if r.Access == Own {
				paths = append(paths, r.Path)
			}
		}
		return paths
	}
	t.Setenv("GOCOVERDIR", "")
	t.Setenv("RNBD_METRICS_FILE", "")
	if got := own(); !slices.Equal(got, []string{"/sockets"}) {
		t.Errorf("%v", got)
	}
	t.Setenv("GOCOVERDIR", "/cover")
	t.Setenv("RNBD_METRICS_FILE", "/metrics/file")
	if got := own(); !slices.Equal(got, []string{"/sockets", "/cover", "/metrics"}) {
		t.Errorf("%v", got)
	}
}

func TestRuntimeOfExecutables(t *testing.T) {
	dir := t.TempDir()
	file := func(content string) *os.File {
		path := filepath.Join(dir, "f")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { f.Close() })
		return f
	}
	if rules, script := Runtime(file("#!/bin/sh\n")); !script || len(rules) == 0 {
		t.Errorf("a script: %v %v", rules, script)
	}
	for _, s := range []string{"", "x", "\x7fELF", strings.Repeat("\x7fELF", 100)} {
		if rules, script := Runtime(file(s)); script || len(rules) > 0 {
			t.Errorf("%q: %v %v", s, rules, script)
		}
	}
	sh, err := os.Open("/bin/sh")
	if err != nil {
		t.Skip(err)
	}
	defer sh.Close()
	rules, script := Runtime(sh)
	if script || !slices.ContainsFunc(rules, func(r Rule) bool { return strings.Contains(filepath.Base(r.Path), "ld-") && r.Access == Run }) {
		t.Errorf("a program of the C library: %v %v", rules, script)
	}
}
