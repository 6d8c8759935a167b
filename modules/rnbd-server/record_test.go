package server

import (
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// changes are the events of a kind, each in a line.
func changes(j *journal.Journal, kind journal.Kind) (out []string) {
	for _, e := range j.After(0) {
		if e.Kind == kind {
			out = append(out, strings.TrimSpace(e.Session+" "+e.Device+e.Plugin)+": "+e.From+" -> "+e.To)
		}
	}
	return out
}

func contains(t *testing.T, all []string, want ...string) {
	t.Helper()
	rest := all
	for _, w := range want {
		for len(rest) > 0 && rest[0] != w {
			rest = rest[1:]
		}
		if len(rest) == 0 {
			t.Errorf("no %q in its place in\n%s", w, strings.Join(all, "\n"))
			return
		}
		rest = rest[1:]
	}
}

// The journal has what becomes of sessions, devices and plugins, in order.
func TestJournal_HasChangesOfState(t *testing.T) {
	j := journal.New(100)
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("d", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.Journal = j })
	i := r.connect("s")
	dev, err := i.open("d", blk.ReadWrite)
	must(t, err)
	r.process().Kill()
	if errno := i.rw(dev.DeviceID, blk.Write, 0, make([]byte, 512)); errno != blk.OK {
		t.Fatalf("errno %d", errno)
	}
	contains(t, changes(j, journal.Session), "s:  -> connected")
	contains(t, changes(j, journal.Device), "s d:  -> open", "dmemory: open -> recovering", "dmemory: recovering -> open")
	contains(t, changes(j, journal.Plugin), "memory: starting -> running", "memory: running -> waiting", "memory: starting -> running")
}

// An event has the reason of a failure, and the one of its end has none.
func TestJournal_HasReasonsOfFailures(t *testing.T) {
	j := journal.New(100)
	mem := newMemory()
	mem.crash = plugin.KeepsAcknowledged
	mem.add("d", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.Journal = j })
	_, err := r.connect("s").open("d", blk.ReadWrite)
	must(t, err)
	mem.setFail("d", syscall.ENXIO)
	r.process().Kill()
	eventually(t, "the device is failed", func() bool { return r.server.openDevicesByName("d").isFailing() })
	mem.setFail("d", nil)
	eventually(t, "the device is back", func() bool { return r.server.openDevicesByName("d").isServing() })
	var failed, back bool
	for _, e := range j.After(0) {
		switch {
		case e.Kind != journal.Device:
		case e.To == "failing":
			failed = strings.Contains(e.Why, "does not open again: ") && strings.Contains(e.Why, syscall.ENXIO.Error())
		case e.To == "open" && e.From != "":
			back = e.Why == ""
		}
	}
	if !failed || !back {
		t.Errorf("%+v", j.After(0))
	}
}
