package cli

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestTopShowsALoad prints screens while a user writes, at both ends, until they show
// what is done.
func TestTopShowsALoad(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	user := dial(t, c, l.Map(c, "disk.img", s).Name)
	ctx, cancel := context.WithCancel(t.Context())
	written := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if _, err := user.WriteAt(make([]byte, 4096), 0); err != nil {
				written <- err
				return
			}
		}
		written <- nil
	}()
	for _, side := range []struct{ mode, socket, device string }{{"client", c.Socket, "rnbd0"}, {"server", s.Socket, "disk.img"}} {
		// DEVICE SESSION STATE IOPS RD/s WR/s INFL FAIL HUNG and p50, p99 of three stages
		topUntil(t, side.socket, []string{side.mode, "top", "--once"}, func(screen string) bool {
			f := row(screen, side.device)
			return len(f) == 15 && f[2] == "open" && f[3] != "0" && f[3] != "-" && f[4] == "0" && f[5] != "0" && f[7] == "0" && f[8] == "0" && !slices.Contains(f[9:], "-")
		})
		topUntil(t, side.socket, []string{"top", "--batch", "2", "--interval", "500ms", "--view", "paths"}, func(screen string) bool {
			f := row(screen[strings.LastIndex(screen, "PATH "):], "")
			return strings.Count(screen, "PATH ") == 2 && len(f) >= 11 && f[1] == "connected" && f[2] == "iwarp" && f[3] != "0" && f[3] != "-"
		})
	}
	cancel()
	if err := <-written; err != nil {
		t.Errorf("the load: %v", err)
	}
}

// topUntil runs top again and again until its screen is right.
func topUntil(t *testing.T, socket string, args []string, right func(string) bool) {
	t.Helper()
	for end := time.Now().Add(limit); ; {
		r := rnbdAt(t, socket, args...)
		if r.code != 0 || !strings.Contains(r.out, "HUNG") && !strings.Contains(r.out, "PATH ") {
			t.Fatalf("%v: exit code %d: %s%s", args, r.code, r.out, r.err)
		}
		if right(r.out) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%v does not show the load, but\n%s", args, r.out)
		}
	}
}

// row returns the words of the line that begins with name; "": of the second line.
func row(screen, name string) []string {
	for i, line := range strings.Split(screen, "\n") {
		if f := strings.Fields(line); len(f) > 0 && (name == "" && i == 1 || f[0] == name) {
			return f
		}
	}
	return nil
}

// tty is a terminal with a program on it.
type tty struct {
	t             *testing.T
	keyboard, end *os.File
	cmd           *exec.Cmd
	before        unix.Termios
	mu            sync.Mutex
	shown         []byte
}

// onTerminal runs rnbd on a terminal of 80 columns and 24 lines.
func onTerminal(t *testing.T, args ...string) *tty {
	t.Helper()
	keyboard, end := terminal(t)
	w := &tty{t: t, keyboard: keyboard, end: end}
	w.resize(80, 24)
	before, err := unix.IoctlGetTermios(int(end.Fd()), unix.TCGETS)
	if err != nil {
		t.Fatal(err)
	}
	w.before = *before
	w.cmd = exec.Command(program(t), args...)
	w.cmd.Env = append(slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "COLUMNS=") }), "TERM=xterm", "NO_COLOR=1")
	w.cmd.Stdin, w.cmd.Stdout, w.cmd.Stderr = end, end, end
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	if err := w.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		b := make([]byte, 4096)
		for {
			n, err := keyboard.Read(b)
			if err != nil { // nobody has the terminal any more
				return
			}
			w.mu.Lock()
			w.shown = append(w.shown, b[:n]...)
			w.mu.Unlock()
		}
	}()
	t.Cleanup(func() {
		w.cmd.Process.Kill()
		w.cmd.Wait()
		end.Close()
		<-read
	})
	return w
}

func (w *tty) resize(width, height uint16) {
	w.t.Helper()
	if err := unix.IoctlSetWinsize(int(w.keyboard.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: height, Col: width}); err != nil {
		w.t.Fatal(err)
	}
}

// screen is all that was shown last: from the last time on that the cursor went home.
func (w *tty) screen() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := w.shown[max(0, bytes.LastIndex(w.shown, []byte("\x1b[H"))):]
	return strings.ReplaceAll(string(last), "\r\r\n", "\r\n") // the terminal adds one
}

// shows types keys, and waits for a screen with all texts.
func (w *tty) shows(keys string, texts ...string) {
	w.t.Helper()
	if _, err := w.keyboard.WriteString(keys); err != nil {
		w.t.Fatal(err)
	}
	w.await(strings.Join(texts, " and ")+" after "+keys, func(screen string) bool {
		return !slices.ContainsFunc(texts, func(s string) bool { return !strings.Contains(screen, s) })
	})
}

func (w *tty) await(what string, seen func(string) bool) {
	w.t.Helper()
	for end := time.Now().Add(limit); !seen(w.screen()); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			w.t.Fatalf("%q is not shown, but %q", what, w.screen())
		}
	}
}

// ended waits for the end of the program, and checks that the terminal is as before.
func (w *tty) ended(code int) {
	w.t.Helper()
	killed := time.AfterFunc(limit, func() { w.cmd.Process.Kill() })
	defer killed.Stop()
	w.cmd.Wait()
	if got := w.cmd.ProcessState.ExitCode(); got != code {
		w.t.Errorf("exit code %d, want %d: %q", got, code, w.screen())
	}
	now, err := unix.IoctlGetTermios(int(w.end.Fd()), unix.TCGETS)
	if err != nil {
		w.t.Fatal(err)
	}
	if *now != w.before {
		w.t.Errorf("the terminal is %+v, before it was %+v", *now, w.before)
	}
	w.await("the first screen, with a cursor", func(screen string) bool {
		return strings.HasSuffix(screen, "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l")
	})
}

// TestTopOnATerminal presses the keys, changes the size of the terminal, and has the
// daemon go away and come back.
func TestTopOnATerminal(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{})
	l.Map(c, "disk.img", s)
	w := onTerminal(t, "client", "top", "--interval", "200ms", "--socket", c.Socket)
	w.shows("", "rnbd0", "1 of 1 paths connected  by iops", "q quit")
	w.shows("p", "PATH", "connected")
	w.shows("s", "by daemon")
	w.shows("r", "by daemon reversed")
	w.shows("e", "daemon: ready")
	w.shows("d/zz", "filter: zz_")
	w.shows("\r", "no device fits the filter")
	w.shows("\x1b", "rnbd0 ")
	w.shows(" ", "paused")
	w.resize(30, 8)
	w.await("eight short lines", func(screen string) bool {
		lines := strings.Split(screen, "\r\n")
		return len(lines) == 8 && strings.HasPrefix(lines[7], "q quit  d devices  p paths  e…\x1b[K")
	})
	w.resize(80, 24)
	w.await("24 lines", func(screen string) bool { return strings.Count(screen, "\r\n") == 23 })
	w.shows(" ")
	w.await("no pause", func(screen string) bool {
		return strings.Contains(screen, "q quit") && !strings.Contains(screen, "paused")
	})
	if err := c.Stop(); err != nil {
		t.Fatal(err)
	}
	w.shows("", "the client daemon does not answer")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	w.await("the daemon is back", func(screen string) bool {
		return strings.Contains(screen, "no devices") && !strings.Contains(screen, "does not answer")
	})
	w.shows("q")
	w.ended(0)
}

// TestTopRestoresTheTerminal ends top in all ways that leave it time.
func TestTopRestoresTheTerminal(t *testing.T) {
	l := lab.New(t)
	c := l.Client(lab.ClientOptions{})
	for name, end := range map[string]func(*tty){
		"q":       func(w *tty) { w.shows("q") },
		"ctrl-c":  func(w *tty) { w.shows("\x03") },
		"ctrl-\\": func(w *tty) { w.shows("\x1c") },
		"SIGTERM": func(w *tty) { w.cmd.Process.Signal(syscall.SIGTERM) },
		"SIGHUP":  func(w *tty) { w.cmd.Process.Signal(syscall.SIGHUP) },
	} {
		t.Run(name, func(t *testing.T) {
			w := onTerminal(t, "top", "--socket", c.Socket)
			w.shows("", "no devices", "q quit")
			end(w)
			w.ended(0)
		})
	}
}
