package ctltree

import (
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"
)

func quiet(name string) Options { return Options{Name: name, Logger: slog.New(slog.DiscardHandler)} }

func hello(text string) Fixed { return Fixed{"f": Text(func() string { return text })} }

func TestTwoDaemonsShareAFolder(t *testing.T) {
	mayMount(t)
	root := filepath.Join(t.TempDir(), "with blank")
	a, err := Mount(root, map[string]Node{"class/a": hello("a"), "class/x": Link("../class/a"), "block": hello("block")}, quiet("first"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := Mount(root, map[string]Node{"class/b": hello("b")}, quiet("second"))
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"class/a/f": "a\n", "class/b/f": "b\n", "class/x/f": "a\n", "block/f": "block\n"} {
		if got, err := read(filepath.Join(root, path)); got != want || err != nil {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if got, err := read(root + "/class/b/f"); got != "b\n" || err != nil {
		t.Errorf("after the other daemon's end: %q, %v", got, err)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if entries, _ := os.ReadDir(root); len(entries) != 0 {
		t.Errorf("left behind: %v", entries)
	}
}

func TestPlaceInUse(t *testing.T) {
	mayMount(t)
	t.Run("by a daemon that lives", func(t *testing.T) {
		root := t.TempDir()
		first, err := Mount(root, map[string]Node{"z": hello("first")}, quiet("first"))
		if err != nil {
			t.Fatal(err)
		}
		defer first.Close()
		_, err = Mount(root, map[string]Node{"a": hello("second"), "z": hello("second")}, quiet("second"))
		if !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), source("first")) {
			t.Errorf("got %v; want EBUSY and who it is", err)
		}
		if _, err := os.Stat(root + "/a"); !os.IsNotExist(err) {
			t.Errorf("the refused daemon left a place behind: %v", err)
		}
		if got, err := read(root + "/z/f"); got != "first\n" || err != nil {
			t.Errorf("the first daemon's file: %q, %v", got, err)
		}
	})
	t.Run("by another file system", func(t *testing.T) {
		root := t.TempDir()
		if err := os.Mkdir(root+"/z", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mount("tmpfs", root+"/z", "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
		defer syscall.Unmount(root+"/z", 0)
		if _, err := Mount(root, map[string]Node{"z": hello("")}, quiet("d")); !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), "tmpfs") {
			t.Errorf("got %v; want EBUSY and what it is", err)
		}
	})
	t.Run("by files", func(t *testing.T) {
		root := t.TempDir()
		if err := os.MkdirAll(root+"/z/keep", 0o755); err != nil {
			t.Fatal(err)
		}
		if _, err := Mount(root, map[string]Node{"z": hello("")}, quiet("d")); !errors.Is(err, syscall.ENOTEMPTY) {
			t.Errorf("got %v; want ENOTEMPTY", err)
		}
		if _, err := os.Stat(root + "/z/keep"); err != nil {
			t.Error(err)
		}
	})
	t.Run("by a file", func(t *testing.T) {
		root := t.TempDir()
		if err := os.WriteFile(root+"/z", nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Mount(root, map[string]Node{"z": hello("")}, quiet("d")); !errors.Is(err, syscall.ENOTDIR) {
			t.Errorf("got %v; want ENOTDIR", err)
		}
	})
}

// TestMountOfAKilledDaemonIsCleared runs this program again as the daemon.
func TestMountOfAKilledDaemonIsCleared(t *testing.T) {
	if root := os.Getenv("CTLTREE_TEST_ROOT"); root != "" {
		if _, err := Mount(root, map[string]Node{"z": hello("killed"), "l": Link("z")}, quiet("killed")); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		return
	}
	mayMount(t)
	root := t.TempDir()
	daemon := exec.Command(os.Args[0], "-test.run=^TestMountOfAKilledDaemonIsCleared$")
	daemon.Env = append(os.Environ(), "CTLTREE_TEST_ROOT="+root)
	if err := daemon.Start(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if got, _ := read(root + "/z/f"); got == "killed\n" {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the daemon does not mount")
		}
	}
	daemon.Process.Kill()
	daemon.Wait()
	if _, err := read(root + "/z/f"); !errors.Is(err, syscall.ENOTCONN) {
		t.Fatalf("the mount of the killed daemon: %v; want ENOTCONN", err)
	}
	tree, err := Mount(root, map[string]Node{"z": hello("new"), "l": Link("z")}, quiet("new"))
	if err != nil {
		t.Fatal(err)
	}
	if got, err := read(root + "/z/f"); got != "new\n" || err != nil {
		t.Errorf("the new daemon's file: %q, %v", got, err)
	}
	if err := tree.Close(); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(root); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}
}

func TestMountsAt(t *testing.T) {
	const table = `22 1 0:20 / /proc rw,nosuid - proc proc rw
90 22 0:50 / /run/rnbd/sys/block rw,nosuid shared:12 master:3 - fuse.rnbd-client rnbd-client:77 rw,user_id=0
91 22 0:51 / /run/rnbd/sys/block\040two rw - tmpfs a\134b rw
92 90 0:52 / /run/rnbd/sys/block rw - tmpfs tmpfs rw
short
`
	for path, want := range map[string][]mounted{
		"/proc":                   {{"proc", "proc"}},
		"/run/rnbd/sys/block":     {{"fuse.rnbd-client", "rnbd-client:77"}, {"tmpfs", "tmpfs"}},
		"/run/rnbd/sys/block two": {{"tmpfs", `a\b`}},
		"/run/rnbd/sys":           nil,
	} {
		got, err := mountsAt(strings.NewReader(table), path)
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %v, %v; want %v", path, got, err, want)
		}
	}
}

// A folder for another daemon's mount is there from the start, and gone in the end.
func TestAFolderForOthers(t *testing.T) {
	root := t.TempDir()
	tree, err := Mount(root, map[string]Node{"block": Folder{}}, quiet("one"))
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Stat(filepath.Join(root, "block")); err != nil || !st.IsDir() {
		t.Errorf("no folder: %v", err)
	}
	if err := tree.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(root, "block")); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
}
