package client

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
)

func TestLinks(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "rnbd")
	c := &Client{cfg: Config{LinkDir: dir}, log: slog.New(slog.DiscardHandler)}
	d := &Device{client: c, log: c.log, path: "/vg0/lv 1", session: &session{name: "s1"}, location: "/dev/null"}
	d.makeLink()
	name := filepath.Join(dir, "s1", "!vg0!lv 1")
	if target, err := os.Readlink(name); err != nil || target != "/dev/null" {
		t.Fatalf("link: %q, %v", target, err)
	}
	d.location = "/dev/zero" // made anew elsewhere
	d.makeLink()
	if target, _ := os.Readlink(name); target != "/dev/zero" {
		t.Errorf("link leads to %q", target)
	}
	c.sweepLinks()
	if _, err := os.Readlink(name); err != nil {
		t.Errorf("a link that leads somewhere is swept: %v", err)
	}
	d.location = "/dev/full" // not where the link leads
	d.removeLink()
	if _, err := os.Readlink(name); err != nil {
		t.Errorf("somebody else's link is removed: %v", err)
	}
	d.location = "/dev/zero"
	d.removeLink()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("empty folders are left: %v", err)
	}
}

func TestLinks_Stale(t *testing.T) {
	dir := t.TempDir()
	c := &Client{cfg: Config{LinkDir: dir}, log: slog.New(slog.DiscardHandler)}
	must(t, os.Mkdir(filepath.Join(dir, "s1"), 0o755))
	must(t, os.Mkdir(filepath.Join(dir, "s2"), 0o755))
	must(t, os.Symlink("/dev/rnbd-test-gone", filepath.Join(dir, "s1", "x")))
	must(t, os.WriteFile(filepath.Join(dir, "s2", "file"), nil, 0o644))
	c.sweepLinks()
	if _, err := os.Lstat(filepath.Join(dir, "s1")); !os.IsNotExist(err) {
		t.Errorf("a stale link is left: %v", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "s2", "file")); err != nil {
		t.Errorf("what is no link is removed: %v", err)
	}
}

// A device without a block device gets no link, and a file in the way stays.
func TestLinks_None(t *testing.T) {
	dir := t.TempDir()
	c := &Client{cfg: Config{LinkDir: dir}, log: slog.New(slog.DiscardHandler)}
	d := &Device{client: c, log: c.log, path: "x", session: &session{name: "s1"}, location: "nbd+unix:///x?socket=/y"}
	d.makeLink()
	if entries, _ := os.ReadDir(dir); len(entries) != 0 {
		t.Errorf("made %v", entries)
	}
	d.location = "/dev/null"
	must(t, os.Mkdir(filepath.Join(dir, "s1"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "s1", "x"), []byte("mine"), 0o644))
	d.makeLink()
	if b, _ := os.ReadFile(filepath.Join(dir, "s1", "x")); string(b) != "mine" {
		t.Error("a file is replaced")
	}
}

func TestChanged(t *testing.T) {
	sys := t.TempDir()
	if err := sendChange(sys, "/dev/ublkb1"); !os.IsNotExist(err) {
		t.Errorf("of a disk that is gone: %v", err)
	}
	must(t, os.Mkdir(filepath.Join(sys, "ublkb1"), 0o755))
	uevent := filepath.Join(sys, "ublkb1", "uevent")
	must(t, os.WriteFile(uevent, nil, 0o644))
	must(t, sendChange(sys, "/dev/ublkb1"))
	if b, _ := os.ReadFile(uevent); string(b) != "change" {
		t.Errorf("the kernel is told %q", b)
	}
}
