package client

import (
	"errors"
	"net"
	"path/filepath"
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
	s, err := listen("unix:" + path)
	must(t, err)
	defer s.file.Close()
	began := time.Now()
	if _, err := listen("unix:" + path); !errors.Is(err, syscall.EADDRINUSE) || time.Since(began) < orphanEnds {
		t.Errorf("somebody serves: %v after %v", err, time.Since(began))
	}
}
