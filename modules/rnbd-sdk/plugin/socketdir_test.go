package plugin

import (
	"os"
	"path/filepath"
	"testing"
)

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

func TestDirectoriesOfDeadHostsAreRemoved(t *testing.T) {
	base := t.TempDir()
	t.Setenv("TMPDIR", base)
	if len(base) > 40 {
		var err error
		if base, err = os.MkdirTemp("/tmp", "sd"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(base) })
		t.Setenv("TMPDIR", base)
	}
	living, err := newSocketDir()
	if err != nil {
		t.Fatal(err)
	}
	defer living.remove()
	dead, err := newSocketDir()
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
