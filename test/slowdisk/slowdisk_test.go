package slowdisk

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func TestHeldWritesAreAppliedOnlyAfterRelease(t *testing.T) {
	d := New(t, 1<<20)
	for name, path := range map[string]string{"file": d.Path(), "loop device": d.Loop()} {
		t.Run(name, func(t *testing.T) {
			before := len(d.History())
			fill := byte(before + 1)
			d.HoldWrites()
			done := make(chan error, 1)
			go func() { done <- writeDirect(path, fill) }()
			d.WaitHeld(1)
			if d.Bytes(8192, 1)[0] == fill {
				t.Error("a held write is on the medium")
			}
			select {
			case err := <-done:
				t.Fatalf("the writer returned (%v) while its write was held", err)
			case <-time.After(20 * time.Millisecond):
			}
			released := time.Now()
			d.Release()
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			w := d.History()[before]
			if w.Off != 8192 || w.Len != 4096 || w.First != fill || w.Applied.Before(released) {
				t.Errorf("history says %+v, released at %v", w, released)
			}
			if !bytes.Equal(d.Bytes(8192, 4096), bytes.Repeat([]byte{fill}, 4096)) {
				t.Error("the released write is not on the medium")
			}
		})
	}
}

func TestDelayAndErrors(t *testing.T) {
	d := New(t, 1<<20)
	d.SetDelay(30 * time.Millisecond)
	start := time.Now()
	if err := writeDirect(d.Path(), 1); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < 30*time.Millisecond {
		t.Errorf("a write delayed by 30 ms took %v", took)
	}
	d.SetDelay(0)
	d.SetError(syscall.EIO)
	if err := writeDirect(d.Path(), 2); !errors.Is(err, syscall.EIO) {
		t.Errorf("a failing write gives %v, want EIO", err)
	}
	d.SetError(0)
	if got := d.Bytes(8192, 1)[0]; got != 1 {
		t.Errorf("the failed write left %d on the medium, want 1", got)
	}
}

// writeDirect writes 4 KiB of fill at 8 KiB past the page cache.
func writeDirect(path string, fill byte) error {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	room := bytes.Repeat([]byte{fill}, 8192)
	skip := -int(uintptr(unsafe.Pointer(&room[0]))) & 4095
	_, err = f.WriteAt(room[skip:skip+4096], 8192)
	return err
}

func TestChildrenDoNotInheritTheMount(t *testing.T) {
	New(t, 1<<20)
	out, err := exec.Command("ls", "-l", "/proc/self/fd").CombinedOutput()
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(out, []byte("/dev/fuse")) {
		t.Errorf("a child has the FUSE device open:\n%s", out)
	}
}
