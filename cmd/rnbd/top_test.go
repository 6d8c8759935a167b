package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/top"
)

// TestAPanicOfTopRestoresTheTerminal has the sampler panic in its own goroutine.
func TestAPanicOfTopRestoresTheTerminal(t *testing.T) {
	keyboard, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	defer keyboard.Close()
	if err := unix.IoctlSetPointerInt(int(keyboard.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(keyboard.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminals here: %v", err)
	}
	before, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	var cause any
	func() {
		defer func() { cause = recover() }()
		broken := &topSampler{set: onClient, limit: time.Minute} // without a command
		err = broken.watch(t.Context(), tty, tty, topOptions{interval: time.Minute, state: top.NewState("", "", "")}, false)
	}()
	if cause == nil {
		t.Fatalf("it did not panic, but: %v", err)
	}
	after, err := unix.IoctlGetTermios(int(tty.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	if *after != *before {
		t.Errorf("the terminal is %+v, before it was %+v", *after, *before)
	}
	// What it wrote may arrive in parts.
	const end = "\x1b[?25h\x1b[?1049l"
	shown := make(chan string, 1)
	go func() {
		var all string
		for b := make([]byte, 4096); !strings.HasSuffix(all, end); {
			got, err := keyboard.Read(b)
			if err != nil {
				break
			}
			all += string(b[:got])
		}
		shown <- all
	}()
	select {
	case all := <-shown:
		if !strings.HasSuffix(all, end) {
			t.Errorf("it shows %q", all)
		}
	case <-time.After(30 * time.Second):
		t.Error("the screen is not put back")
	}
	fmt.Fprintln(keyboard) // for the reader of keys, so that it ends
}
