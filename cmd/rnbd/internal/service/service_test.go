package service

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// manager listens for messages, as the service manager does.
func manager(t *testing.T) *net.UnixConn {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	t.Setenv(envNotify, path)
	return c
}

func next(t *testing.T, c *net.UnixConn, limit time.Duration) string {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(limit))
	b := make([]byte, 4096)
	n, err := c.Read(b)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return ""
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(b[:n])
}

func meet(t *testing.T) *Manager {
	t.Helper()
	m, err := Meet()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMessages(t *testing.T) {
	c := manager(t)
	m := meet(t)
	if os.Getenv(envNotify) != "" {
		t.Error("plugins would get the socket")
	}
	m.Ready("serves")
	if got := next(t, c, time.Minute); got != "READY=1\nSTATUS=serves" {
		t.Errorf("%q", got)
	}
	m.Reloading()
	if got := next(t, c, time.Minute); !strings.HasPrefix(got, "RELOADING=1\nMONOTONIC_USEC=") {
		t.Errorf("%q", got)
	}
	m.Stopping(20 * time.Second)
	if got := next(t, c, time.Minute); !strings.HasPrefix(got, "STOPPING=1\n") || !strings.HasSuffix(got, "EXTEND_TIMEOUT_USEC=20000000") {
		t.Errorf("%q", got)
	}
}

// The next process of the service gets the manager, not its sockets.
func TestEnvironmentOfAnotherProcess(t *testing.T) {
	c := manager(t)
	t.Setenv(envInterval, "3000000")
	t.Setenv(envWatched, "")
	m := meet(t)
	m.MainProcess(77)
	if got := next(t, c, time.Minute); got != "MAINPID=77" {
		t.Errorf("%q", got)
	}
	for _, e := range m.Environment() {
		name, value, _ := strings.Cut(e, "=")
		t.Setenv(name, value)
	}
	if again := meet(t); again.watchdog != 3*time.Second || again.notify.Name != m.notify.Name {
		t.Errorf("%+v", again)
	}
	if env := (&Manager{}).Environment(); len(env) > 0 {
		t.Errorf("without a manager: %q", env)
	}
}

func TestWithoutAManager(t *testing.T) {
	for _, name := range []string{envNotify, envInterval, envPID, envNumber} {
		t.Setenv(name, "")
	}
	m := meet(t)
	m.Ready("")
	m.Watch(t.Context(), slog.New(slog.DiscardHandler), func(context.Context) error { t.Error("asked"); return nil })
	if s := m.Sockets("control"); s != nil {
		t.Errorf("sockets %v", s)
	}
}

func TestDescriptionsOfOthersAndWithoutSense(t *testing.T) {
	other := strconv.Itoa(os.Getppid())
	for name, x := range map[string]struct {
		env map[string]string
		bad bool
	}{
		"sockets of another process":   {env: map[string]string{envNumber: "5", envPID: other}},
		"sockets without a process":    {env: map[string]string{envNumber: "5"}},
		"watchdog of another process":  {env: map[string]string{envInterval: "1000", envWatched: other}},
		"a number that is none":        {env: map[string]string{envNumber: "x", envPID: strconv.Itoa(os.Getpid())}, bad: true},
		"more sockets than make sense": {env: map[string]string{envNumber: "99999", envPID: strconv.Itoa(os.Getpid())}, bad: true},
		"fewer than none":              {env: map[string]string{envNumber: "-1", envPID: strconv.Itoa(os.Getpid())}, bad: true},
		"an interval that is none":     {env: map[string]string{envInterval: "soon"}, bad: true},
		"an interval of nothing":       {env: map[string]string{envInterval: "0"}, bad: true},
	} {
		t.Run(name, func(t *testing.T) {
			for k, v := range x.env {
				t.Setenv(k, v)
			}
			m, err := Meet()
			if x.bad {
				if err == nil {
					t.Error("it is believed")
				}
				return
			}
			if err != nil || m.watchdog != 0 || len(m.sockets) != 0 {
				t.Errorf("%v, %+v", err, m)
			}
		})
	}
}

// A daemon that hangs does not feed the watchdog, and one that hangs no more does.
func TestWatch(t *testing.T) {
	c := manager(t)
	t.Setenv(envInterval, "60000")
	t.Setenv(envWatched, strconv.Itoa(os.Getpid()))
	m := meet(t)
	var hangs atomic.Bool
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		m.Watch(ctx, slog.New(slog.DiscardHandler), func(ctx context.Context) error {
			if hangs.Load() {
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		})
	}()
	if got := next(t, c, time.Minute); got != "WATCHDOG=1" {
		t.Fatalf("%q", got)
	}
	hangs.Store(true)
	quiet := false
	for range 100 { // those that were on their way
		if quiet = next(t, c, 300*time.Millisecond) == ""; quiet {
			break
		}
	}
	if !quiet {
		t.Error("a daemon that hangs feeds the watchdog")
	}
	hangs.Store(false)
	if got := next(t, c, time.Minute); got != "WATCHDOG=1" {
		t.Errorf("after it hung: %q", got)
	}
	cancel()
	<-ended
}

// systemctl fails in the state that matters.
func TestHostStops(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin+":/usr/bin:/bin")
	ctl := filepath.Join(bin, "systemctl")
	for answer, want := range map[string]bool{"echo stopping; exit 1": true, "echo running": false, "echo degraded; exit 1": false, "exit 1": false} {
		if err := os.WriteFile(ctl, []byte("#!/bin/sh\n"+answer+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
		manager(t)
		if got := meet(t).HostStops(t.Context()); got != want {
			t.Errorf("%s: %v", answer, got)
		}
		if meet(t).HostStops(t.Context()) { // the environment is gone
			t.Errorf("%s: the manager of others is asked", answer)
		}
	}
}
