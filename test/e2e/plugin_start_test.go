package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// badPlugins are plugins that do not start: one says nothing, one ends at once.
func badPlugins(t *testing.T) map[string]string {
	t.Helper()
	dir, all := t.TempDir(), map[string]string{}
	for name, text := range map[string]string{"silent": "exec sleep 1000", "broken": "echo no such luck >&2; exit 3"} {
		all[name] = filepath.Join(dir, name)
		if err := os.WriteFile(all[name], []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

// TestDaemonsServeBesidePluginsThatDoNotStart starts both daemons with plugins that do
// not start. The others serve, and doctor, show and events name the two.
func TestDaemonsServeBesidePluginsThatDoNotStart(t *testing.T) {
	bad := badPlugins(t)
	l := lab.New(t)
	dir := l.Image("disk.img", 1<<20)
	var io, front []string
	for name, path := range bad {
		io, front = append(io, "--io-plugin", name+"="+path), append(front, "--frontend-plugin", name+"="+path)
	}
	begun := time.Now()
	s := l.Server(lab.ServerOptions{SearchPath: dir, Extra: io})
	c := l.Client(lab.ClientOptions{Extra: front})
	if took := time.Since(begun); took > 25*time.Second { // 5 s each on a host that is not busy
		t.Errorf("the daemons needed %v", took)
	}
	d := l.Map(c, "disk.img", s)
	if d.State != "open" {
		t.Errorf("the device is %v", d)
	}
	for kind, socket := range map[string]string{"server": s.Socket, "client": c.Socket} {
		eventually(t, "the "+kind+" says why", func() bool {
			return strings.Contains(rnbd(t, kind, "show", "conditions", "csv", "--socket", socket).out, "no such luck")
		})
		conditions := rnbd(t, kind, "show", "conditions", "csv", "--socket", socket).out
		if strings.Count(conditions, "plugin-down") != 2 || !strings.Contains(conditions, "plugin-down silent: ") || !strings.Contains(conditions, "plugin-down broken: failed: does not start: ") {
			t.Errorf("%s: conditions\n%s", kind, conditions)
		}
		if got := rnbd(t, "doctor", "--socket", socket); got.code != 1 || !strings.Contains(got.out, "broken") || !strings.Contains(got.out, "silent") {
			t.Errorf("%s: doctor\n%s", kind, got.out)
		}
		if got := rnbd(t, "events", "--socket", socket).out; !strings.Contains(got, "broken") || !strings.Contains(got, "no such luck") {
			t.Errorf("%s: events\n%s", kind, got)
		}
	}
	repaired, err := os.ReadFile(filepath.Join(l.Bin, "io-memory"))
	if err == nil {
		err = os.WriteFile(bad["broken"], repaired, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the repaired plugin runs", func() bool {
		p, err := s.Plugin("broken")
		return err == nil && p.State == "running" && p.Version != ""
	})
}
