package blockdev

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// loop makes a loop device. Few sandboxes allow it.
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
			if n, err = Users(path); err != nil || n != want {
				continue
			}
			if n, err = UsersOf(filepath.Base(path)); err == nil && n == want { // needs no node
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
	users(0) // but us
	if _, err := Claim(t.Context(), path); !errors.Is(err, syscall.EBUSY) || !strings.Contains(err.Error(), "mounted") {
		t.Errorf("claimed twice: %v", err)
	}
	hold.Close()
	users(0)
}

// Asking for users keeps no process from mounting.
func TestUsers_DisturbNobody(t *testing.T) {
	path := loop(t)
	over := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(over)
	wg.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
				_, _ = Users(path)
			}
		}
	})
	for range 2000 {
		f, err := exclusive(path)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
}

func TestUsers_Mounted(t *testing.T) {
	path, dir := loop(t), t.TempDir()
	if out, err := exec.Command("mke2fs", "-q", path).CombinedOutput(); err != nil {
		t.Skipf("no mke2fs: %v: %s", err, out)
	}
	if err := syscall.Mount(path, dir, "ext2", syscall.MS_RDONLY, ""); err != nil {
		t.Skip("no ext2 here:", err)
	}
	n, err := Users(path)
	if uerr := syscall.Unmount(dir, 0); uerr != nil {
		t.Error(uerr)
	}
	if n != 1 || err != nil {
		t.Errorf("mounted, it has %d users, %v", n, err)
	}
}

func TestHeld_ReadsTheKernelsTables(t *testing.T) {
	st, err := os.Stat(loop(t))
	if err != nil {
		t.Fatal(err)
	}
	number, _ := deviceNumber(st)
	numbers := map[uint64]bool{number: true}
	device := fmt.Sprintf("%d:%d", unix.Major(number), unix.Minor(number))
	for line, want := range map[string]bool{
		"36 35 " + device + " / /mnt rw,noatime master:1 - ext4 /dev/other rw\n":  true,
		"36 35 0:99 /sub /mnt rw - btrfs /dev/" + nameOf(t, device) + " rw,ssd\n": true,
		"36 35 0:22 / /proc rw - proc proc rw\n":                                  false,
		"36 35 98:0 / /mnt rw - ext4 /dev/nowhere rw\n":                           false,
		"": false,
	} {
		if got := isMountOf(line, numbers); got != want {
			t.Errorf("%q: %t", line, got)
		}
	}
	proc := t.TempDir()
	swaps := "Filename\t\t\t\tType\n/dev/" + nameOf(t, device) + "  partition 1 0 -2\n"
	if err := os.WriteFile(filepath.Join(proc, "swaps"), []byte(swaps), 0o600); err != nil {
		t.Fatal(err)
	}
	if !held(proc, numbers) || held(t.TempDir(), numbers) {
		t.Error("swap is not seen, or seen where there is none")
	}
}

// nameOf is the kernel's name of the device with that number.
func nameOf(t *testing.T, number string) string {
	t.Helper()
	target, err := os.Readlink("/sys/dev/block/" + number)
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Base(target)
}

func TestUsersOf_NoDisk(t *testing.T) {
	if _, err := UsersOf("no-disk0"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
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
