package plugin

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func shortFolder(t *testing.T) string {
	t.Helper()
	base, err := os.MkdirTemp("/tmp", "sd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(base) })
	return base
}

func TestFolderOfThePluginsSockets(t *testing.T) {
	own, temporary := shortFolder(t), shortFolder(t)
	t.Setenv("TMPDIR", temporary)
	if err := os.Chmod(temporary, 0o711); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, base string
		otherUser  bool
		want       string
	}{
		{"that of the host", own, false, own},
		{"none", "", false, temporary},
		{"missing", own + "/x", false, temporary},
		{"too long", filepath.Join(own, strings.Repeat("l", maxSocketBase)), false, temporary},
		{"closed to the plugin's user", own, true, temporary},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, err := newSocketDir(c.base, c.otherUser)
			if err != nil {
				t.Fatal(err)
			}
			defer d.remove()
			if got := filepath.Dir(d.path); got != c.want {
				t.Errorf("made in %s, want %s", got, c.want)
			}
		})
	}
	t.Setenv("TMPDIR", "/nonexistent") // a root file system that is read-only
	d, err := newSocketDir(own, false)
	if err != nil {
		t.Fatal(err)
	}
	d.remove()
}

func TestDirectoriesOfDeadHostsAreRemoved(t *testing.T) {
	base := shortFolder(t)
	living, err := newSocketDir(base, false)
	if err != nil {
		t.Fatal(err)
	}
	defer living.remove()
	dead, err := newSocketDir(base, false)
	if err != nil {
		t.Fatal(err)
	}
	dead.lock.Close() // as the kernel does when a process is killed
	if err := os.WriteFile(filepath.Join(dead.path, "plugin123"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	unready, other, link := filepath.Join(base, socketDirPrefix+"1"), filepath.Join(base, "rnbd-other"), filepath.Join(base, socketDirPrefix+"2")
	for _, dir := range []string{unready, other} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(other, ownerFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(other, link); err != nil {
		t.Fatal(err)
	}
	removeOrphans(base)
	for path, want := range map[string]bool{living.path: true, dead.path: false, unready: true, other: true, link: true} {
		if exists(path) != want {
			t.Errorf("%s is there: %t", path, !want)
		}
	}
	living.remove()
	if exists(living.path) {
		t.Error("the host's own directory stays")
	}
	var none *socketDir
	none.remove()
}
