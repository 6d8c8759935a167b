package client

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The plugin of a daemon that was killed has its socket for a moment yet.
func TestListen_AfterAnOrphan(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk.sock")
	orphan, err := net.Listen("unix", path)
	must(t, err)
	time.AfterFunc(200*time.Millisecond, func() { orphan.Close() })
	s, err := openListen("unix:"+path, nil)
	must(t, err)
	defer s.file.Close()
	began := time.Now()
	if _, err := openListen("unix:"+path, nil); !errors.Is(err, syscall.EADDRINUSE) || time.Since(began) < orphanEnds {
		t.Errorf("somebody serves: %v after %v", err, time.Since(began))
	}
}

// The path of a socket may be longer than an address holds.
func TestListen_LongPath(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("l", 120), "nbd.sock")
	s, err := openListen("unix:"+path, nil)
	must(t, err)
	if s.name != "unix:"+path || s.path != path {
		t.Errorf("name %q, path %q", s.name, s.path)
	}
	again, err := openListen("unix:"+path, s.file) // as the next process of the daemon does
	must(t, err)
	if again.name != s.name || again.path != path {
		t.Errorf("the next process has name %q, path %q", again.name, again.path)
	}
	again.close()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
}

// A folder that others can change is not used, nor one that is a link.
func TestListen_FolderOfOthers(t *testing.T) {
	open, link := filepath.Join(t.TempDir(), "open"), filepath.Join(t.TempDir(), "link")
	must(t, os.Mkdir(open, 0o700))
	must(t, os.Chmod(open, 0o777))
	must(t, os.Symlink(t.TempDir(), link))
	for dir, want := range map[string]error{open: syscall.EPERM, link: syscall.ENOTDIR} {
		if _, err := openListen("unix:"+filepath.Join(dir, "disk.sock"), nil); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", dir, err, want)
		}
	}
}

// The end of a front end takes its socket away, and not that of the next daemon.
func TestListen_Close(t *testing.T) {
	path := filepath.Join(t.TempDir(), "disk.sock")
	s, err := openListen("unix:"+path, nil)
	must(t, err)
	s.close()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is left: %v", err)
	}
}
