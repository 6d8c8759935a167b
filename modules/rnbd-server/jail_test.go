package server

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestR126_SessionMarker(t *testing.T) {
	for _, c := range []struct{ search, session, want string }{
		{"", "s1", "/"},
		{"/srv/x", "s1", "/srv/x"},
		{"/srv/%SESSNAME%", "s1", "/srv/s1"},
		{"/srv/ns/%SESSNAME%/ignored", "s7", "/srv/ns/s7"},
		{"/srv/a%SESSNAME%", "s7", "/srv/a/s7"},
	} {
		if got := (jail{searchPath: c.search}).sessionRoot(c.session); got != c.want {
			t.Errorf("search path %q: root %q, want %q", c.search, got, c.want)
		}
	}
}

func TestR127_Jail(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(t.TempDir(), "secret")
	must(t, os.WriteFile(outside, []byte("x"), 0o600))
	must(t, os.MkdirAll(filepath.Join(dir, "s1", "sub"), 0o755))
	must(t, os.WriteFile(filepath.Join(dir, "s1", "vol"), make([]byte, 4096), 0o644))
	must(t, os.Symlink("vol", filepath.Join(dir, "s1", "link")))
	must(t, os.Symlink("/vol", filepath.Join(dir, "s1", "rooted")))
	must(t, os.Symlink(outside, filepath.Join(dir, "s1", "escape")))
	must(t, syscall.Mkfifo(filepath.Join(dir, "s1", "fifo"), 0o644))

	j := jail{searchPath: dir + "/%SESSNAME%"}
	for _, c := range []struct {
		name string
		want syscall.Errno
	}{
		{"vol", 0},
		{"/vol", 0},
		{"///vol", 0},
		{"link", 0},
		{"rooted", 0}, // an absolute link starts at the jail's root
		{"escape", syscall.ENOENT},
		{"nope", syscall.ENOENT},
		{"sub", syscall.ENOTBLK},
		{"fifo", syscall.ENOTBLK},
		{"sub/../vol", syscall.EINVAL},
		{"../s1/vol", syscall.EINVAL},
		{"a..b", syscall.EINVAL},
		{strings.Repeat("n", maxPath), syscall.EINVAL},
	} {
		n, err := j.openName("s1", c.name)
		if n != nil {
			n.file.Close()
		}
		if c.want == 0 && err != nil || c.want != 0 && !errors.Is(err, c.want) {
			t.Errorf("open %.40q: %v, want errno %d", c.name, err, c.want)
		}
	}
}

// The folder above those of the sessions is nobody's.
func TestR126_ASessionWithoutANameHasNoFolder(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "s1"), 0o755))
	for _, name := range []string{"vol", "s1/vol"} {
		must(t, os.WriteFile(filepath.Join(dir, name), make([]byte, 4096), 0o644))
		if n, err := (jail{searchPath: dir + "/%SESSNAME%"}).openName("", name); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("open %q for a session without a name: %v, %v, want EINVAL", name, n, err)
		}
	}
	n, err := jail{searchPath: dir}.openName("", "vol") // where sessions share a folder it needs none
	must(t, err)
	n.file.Close()
}

func TestJailByDefaultServesNothing(t *testing.T) {
	for _, name := range []string{"etc/shadow", "dev/null", "dev/sda", "no/such/file"} {
		if _, err := (jail{}).openName("s1", name); !errors.Is(err, syscall.EACCES) {
			t.Errorf("open %s: %v, want EACCES", name, err)
		}
	}
}

func TestJailServesTheBlockDevicesThatAreAskedFor(t *testing.T) {
	j := jail{devices: []string{"/dev/vg0/*", "/dev/sdb"}}
	for _, c := range []struct {
		name, nodePath string
		want           bool
	}{
		{"/dev/vg0/lv1", "/dev/dm-3", true},
		{"dev/vg0/lv1", "/dev/dm-3", true},
		{"/dev/disk/by-id/x", "/dev/sdb", true},
		{"/dev/sdb1", "/dev/sdb1", false},
		{"/dev/vg1/lv1", "/dev/dm-4", false},
		{"/dev/vg0/a/b", "/dev/dm-5", false},
	} {
		if got := j.offersNode(c.name, c.nodePath); got != c.want {
			t.Errorf("%s at %s: offered is %t", c.name, c.nodePath, got)
		}
	}
}

func TestJailWithoutSearchPathServesNoFiles(t *testing.T) {
	j := jail{devices: []string{"/*/*"}}
	_, err := j.openName("s1", "etc/shadow")
	if !errors.Is(err, syscall.ENOTBLK) {
		t.Fatalf("open etc/shadow: %v, want ENOTBLK", err)
	}
	if _, err := j.openName("s1", "proc/self/root/etc/shadow"); !errors.Is(err, syscall.ELOOP) && !errors.Is(err, syscall.ENOTBLK) {
		t.Fatalf("magic link: %v", err)
	}
}

func TestSameFileHasOneIdentity(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "a"), nil, 0o644))
	must(t, os.Link(filepath.Join(dir, "a"), filepath.Join(dir, "b")))
	a, err := jail{searchPath: dir}.openName("s", "a")
	must(t, err)
	defer a.file.Close()
	b, err := jail{searchPath: dir}.openName("s", "/b")
	must(t, err)
	defer b.file.Close()
	if a.id != b.id {
		t.Fatalf("%v and %v: two names of one file are two devices", a.id, b.id)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
