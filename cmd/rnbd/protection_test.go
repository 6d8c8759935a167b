package main

import (
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestProtection_Losses(t *testing.T) {
	before := protection{Rules: 2, TLS: tlsRequire, Auth: []string{tlsRequire, tlsAllow}, NBDTLS: tlsAllow, Confine: "strict", Trusted: []string{"a"}, Exports: []string{"/dev/x"}}
	for name, c := range map[string]struct {
		change func(*protection)
		want   string // empty: nothing is lost
	}{
		"the same":             {func(*protection) {}, ""},
		"more rules":           {func(p *protection) { p.Rules = 9 }, ""},
		"an empty list":        {func(p *protection) { p.Rules = 0 }, ""},
		"no list":              {func(p *protection) { p.Rules = -1 }, "there were 2"},
		"TLS":                  {func(p *protection) { p.TLS = tlsAllow }, "tls is allow, and was require"},
		"TLS of NBD":           {func(p *protection) { p.NBDTLS = tlsOff }, "nbd-tls is off"},
		"more TLS of NBD":      {func(p *protection) { p.NBDTLS = tlsRequire }, ""},
		"auth of one listener": {func(p *protection) { p.Auth = []string{tlsRequire, tlsOff} }, "auth of the weakest listener is off, and was allow"},
		"confinement":          {func(p *protection) { p.Confine = "try" }, "confine is try"},
		"another trusted":      {func(p *protection) { p.Trusted = []string{"a", "b"} }, "b is trusted"},
		"another device":       {func(p *protection) { p.Exports = []string{"/dev/*"} }, "block-devices has /dev/*"},
	} {
		next := before
		c.change(&next)
		got := strings.Join(before.losses(next), "; ")
		if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if err := refuseWeaker(&before, next); (err != nil) != (c.want != "") || err != nil && !errors.Is(err, syscall.EPERM) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := refuseWeaker(nil, protection{}); err != nil {
		t.Errorf("a process of an older version hands over: %v", err)
	}
}

func TestProtection_OfTheLastRun(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "server.sock")
	start := func(p protection) string {
		var log strings.Builder
		compareProtection(socket, p, slog.New(slog.NewTextHandler(&log, nil)))
		return log.String()
	}
	strong := protection{TLS: tlsRequire}
	for _, p := range []protection{strong, strong} {
		if log := start(p); log != "" {
			t.Errorf("log: %s", log)
		}
	}
	if log := start(protection{TLS: tlsOff}); !strings.Contains(log, "tls is off, and was require") {
		t.Errorf("log: %s", log)
	}
}
