package blockdev

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// loop makes a loop device, which few sandboxes allow.
func loop(t *testing.T) string {
	t.Helper()
	image := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(image, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "--find", "--show", image).CombinedOutput()
	if err != nil {
		t.Skipf("no loop device: %v: %s", err, out)
	}
	path := strings.TrimSpace(string(out))
	t.Cleanup(func() { exec.Command("losetup", "--detach", path).Run() })
	return path
}

func TestUsers(t *testing.T) {
	path := loop(t)
	users := func(want int) {
		t.Helper()
		var n int
		var err error
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			if n, err = Users(path); err == nil && n == want {
				return
			}
		}
		t.Errorf("%d users, %v, want %d", n, err, want)
	}
	users(0)
	reader := exec.Command("sleep", "60")
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	reader.ExtraFiles = []*os.File{f}
	if err := reader.Start(); err != nil {
		t.Fatal(err)
	}
	f.Close()
	users(1)
	if _, err := Claim(t.Context(), path); !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), "processes") {
		t.Errorf("claimed while a process has it open: %v", err)
	}
	reader.Process.Kill()
	reader.Wait()
	users(0)
	hold, err := Claim(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	users(1) // held, by us
	if _, err := Claim(t.Context(), path); !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), "mounted") {
		t.Errorf("claimed twice: %v", err)
	}
	hold.Close()
	users(0)
}

func TestNotABlockDevice(t *testing.T) {
	for path, want := range map[string]error{"/dev/null": syscall.ENOTBLK, "/nonexistent": os.ErrNotExist} {
		if _, err := Users(path); !errors.Is(err, want) {
			t.Errorf("users of %s: %v", path, err)
		}
	}
	if _, err := Claim(t.Context(), "/dev/null"); err == nil {
		t.Error("claimed /dev/null")
	}
}
