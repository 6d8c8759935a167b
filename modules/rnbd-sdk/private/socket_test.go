package private

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

func TestSocketWithALongPath(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("l", 150), "d.sock")
	l, err := Listen(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	if st, err := os.Lstat(path); err != nil || st.Mode()&os.ModeSocket == 0 || st.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v", path, st, err)
	}
	c, err := Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := Listen(path, 0); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a second listener: %v", err)
	}
	l.Close()
	if _, err := Dial(t.Context(), path); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("after the end: %v", err)
	}
	if l, err = Listen(path, 0); err != nil {
		t.Fatalf("a stale socket: %v", err)
	}
	l.Close()
}

func TestListenKeepsOtherFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "precious")
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(path, 0); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("on a file: %v", err)
	}
}

func TestListenWaitsForAProcessThatEnds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "d.sock")
	old, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(150*time.Millisecond, func() { old.Close() })
	l, err := Listen(path, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
}
