package hook

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
)

func program(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hook")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// run starts a hook; stop ends it and returns the log.
func run(t *testing.T, h *Hook) (stop func() string) {
	var log bytes.Buffer
	h.Log = slog.New(slog.NewTextHandler(&log, nil))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); h.Run(ctx) }()
	return func() string { cancel(); <-done; return log.String() }
}

func eventually(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within 30 s: " + what)
		}
	}
}

func TestHook_RunsOnceForEachEventInOrder(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	t.Setenv("OUT", out)
	j := journal.New(journal.DefaultSize)
	j.Add(journal.Event{Kind: journal.Daemon, To: "ready"})
	stop := run(t, &Hook{Program: program(t, `echo "$RNBD_EVENT_DAEMON $RNBD_EVENT_NUMBER $RNBD_EVENT_KIND $RNBD_EVENT_DEVICE $RNBD_EVENT_FROM>$RNBD_EVENT_TO: $RNBD_EVENT_WHY" >> "$OUT"`), Daemon: "client", Journal: j})
	j.Add(journal.Event{Kind: journal.Device, Device: "rnbd0", From: "open", To: "closed", Why: "lost $(touch x)\x00\nand more"})
	want := "client 1 daemon  >ready: \nclient 2 device rnbd0 open>closed: lost $(touch x)\\x00\nand more\n"
	eventually(t, "both events arrive", func() bool { b, _ := os.ReadFile(out); return string(b) == want })
	if log := stop(); log != "" {
		t.Errorf("log: %s", log)
	}
}

func TestHook_FailureIsLoggedAndTheNextRuns(t *testing.T) {
	out := filepath.Join(t.TempDir(), "out")
	t.Setenv("OUT", out)
	j := journal.New(journal.DefaultSize)
	stop := run(t, &Hook{Program: program(t, `[ "$RNBD_EVENT_NUMBER" = 2 ] && echo > "$OUT" && exit 0; echo no disk >&2; exit 3`), Journal: j})
	j.Add(journal.Event{})
	j.Add(journal.Event{})
	eventually(t, "the second event arrives", func() bool { _, err := os.Stat(out); return err == nil })
	if log := stop(); !strings.Contains(log, "exit status 3: no disk") || strings.Count(log, "\n") != 1 {
		t.Errorf("log: %s", log)
	}
}

// A program that does not end, and has a child that holds its output, is killed
// with it.
func TestHook_ThatHangsIsKilled(t *testing.T) {
	j := journal.New(journal.DefaultSize)
	out := filepath.Join(t.TempDir(), "out")
	t.Setenv("OUT", out)
	stop := run(t, &Hook{Program: program(t, `[ "$RNBD_EVENT_NUMBER" = 2 ] && echo > "$OUT" && exit 0; sleep 600 & wait`), Journal: j, Limit: 3 * time.Second})
	j.Add(journal.Event{})
	j.Add(journal.Event{})
	eventually(t, "the second event arrives", func() bool { _, err := os.Stat(out); return err == nil })
	if log := stop(); !strings.Contains(log, "did not end within 3s and was killed") {
		t.Errorf("log: %s", log)
	}
}

// Events that the journal does not keep while the program runs are counted.
func TestHook_SaysHowManyItMissed(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("DIR", dir)
	j := journal.New(4)
	stop := run(t, &Hook{Program: program(t, `touch "$DIR/$RNBD_EVENT_NUMBER"; while [ ! -e "$DIR/go" ]; do sleep 0.01; done`), Journal: j})
	j.Add(journal.Event{})
	eventually(t, "the first event arrives", func() bool { _, err := os.Stat(filepath.Join(dir, "1")); return err == nil })
	for range 9 {
		j.Add(journal.Event{})
	}
	if err := os.WriteFile(filepath.Join(dir, "go"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the last event arrives", func() bool { _, err := os.Stat(filepath.Join(dir, "10")); return err == nil })
	if log := stop(); !strings.Contains(log, "missed=5") {
		t.Errorf("log: %s", log)
	}
}

func TestCheck(t *testing.T) {
	good := program(t, "")
	writable := program(t, "")
	if err := os.Chmod(writable, 0o777); err != nil {
		t.Fatal(err)
	}
	data := program(t, "")
	if err := os.Chmod(data, 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		path string
		want error
	}{
		{good, nil}, {"hook", syscall.EINVAL}, {good + "x", fs.ErrNotExist}, {writable, fs.ErrPermission}, {data, syscall.EACCES}, {t.TempDir(), syscall.EACCES},
	} {
		if err := Check(tt.path); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", tt.path, err, tt.want)
		}
	}
}
