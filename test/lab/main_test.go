package lab

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestRemoveLeftovers_NamesAProcess(t *testing.T) {
	shortenPatience(t)
	dir := t.TempDir()
	if err := removeLeftovers(dir); err != nil {
		t.Errorf("an empty folder: %v", err)
	}
	sleep := exec.Command(Tool(t, "sleep"), "1000")
	sleep.Dir = filepath.Join(dir, "below")
	if err := os.Mkdir(sleep.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	if err := removeLeftovers(dir); err == nil || !strings.Contains(err.Error(), "sleep 1000") {
		t.Errorf("a process with a folder below: %v", err)
	}
	if err := sleep.Wait(); err == nil {
		t.Error("the process was not killed")
	}
}

func TestRemoveLeftovers_NamesAMount(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may mount")
	}
	shortenPatience(t)
	dir := t.TempDir()
	inner := filepath.Join(dir, "a folder", "inner")
	for _, point := range []string{filepath.Dir(inner), inner} {
		if err := os.MkdirAll(point, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("tmpfs", point, "tmpfs", 0, ""); err != nil {
			t.Skip("mounts are not permitted here:", err)
		}
	}
	if err := removeLeftovers(dir); err == nil || !strings.Contains(err.Error(), "mount "+inner) {
		t.Errorf("two mounts: %v", err)
	}
	if left := UnmountBelow(dir); left != nil {
		t.Errorf("mounts that are left: %q", left)
	}
}

func shortenPatience(t *testing.T) {
	t.Helper()
	before := Patience
	Patience = 100 * time.Millisecond
	t.Cleanup(func() { Patience = before })
}
