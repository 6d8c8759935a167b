package e2e

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// conditionRig has a device of two paths on a disk that can hang.
type conditionRig struct {
	*testing.T
	disk   *slowdisk.Disk
	server *lab.Server
	client *lab.Client
	user   *nbdclient.Client
	device string
	held   chan error
}

// conditionSide is one of the two daemons.
type conditionSide struct {
	kind, socket string
	log          func() string
}

// tools are those that show conditions: each reports whether it shows a kind with a
// subject.
var conditionTools = map[string]func(t *testing.T, side conditionSide, kind, subject string) bool{
	"doctor": func(t *testing.T, side conditionSide, kind, subject string) bool {
		got := rnbd(t, "doctor", "--socket", side.socket)
		return strings.Contains(got.out, "rnbd explain "+kind+"\n") && strings.Contains(got.out, subject) && got.code == 1
	},
	"show": func(t *testing.T, side conditionSide, kind, subject string) bool {
		return strings.Contains(rnbd(t, side.kind, "show", "conditions", "csv", "--socket", side.socket).out, kind+" "+subject+":")
	},
	"top": func(t *testing.T, side conditionSide, kind, subject string) bool {
		got := rnbd(t, side.kind, "top", "--once", "--interval", "100ms", "--socket", side.socket)
		verdict := regexp.MustCompile(`(?m)^\d+ things? needs? attention: .*$`).FindString(got.out)
		below := strings.Contains(got.out, "\n  "+kind+": ") || !strings.HasPrefix(kind, "requests-")
		return strings.Contains(verdict, kind+" "+subject) && below
	},
	"metrics": func(t *testing.T, side conditionSide, kind, subject string) bool {
		return strings.Contains(readPage(t, side, "metrics"), `rnbd_`+side.kind+`_condition{kind="`+kind+`",subject="`+subject+`"} 1`)
	},
	"status page": func(t *testing.T, side conditionSide, kind, subject string) bool {
		var state struct {
			Verdict    string
			Conditions []struct{ Kind, Subject string }
		}
		if err := json.Unmarshal([]byte(readPage(t, side, "status.json")), &state); err != nil {
			t.Fatal(err)
		}
		for _, c := range state.Conditions {
			if c.Kind == kind && c.Subject == subject {
				return strings.Contains(state.Verdict, kind+" "+subject)
			}
		}
		return false
	},
}

func readPage(t *testing.T, side conditionSide, name string) string {
	answer, err := http.Get(pageOf(t, side.log()) + name)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// conditionFault makes a condition in one or both daemons.
type conditionFault struct {
	kind    string
	subject [2]string // at the client and at the server; empty: there is none
	event   string
	begin   func()
	end     func() // nil: the condition stays for minutes
}

// check makes f, and looks for it in every tool.
func (r *conditionRig) check(f conditionFault) {
	sides := []conditionSide{{"client", r.client.Socket, r.client.Log}, {"server", r.server.Socket, r.server.Log}}
	each := func(do func(side conditionSide, subject, tool string, shows func() bool)) {
		for i, side := range sides {
			if f.subject[i] == "" {
				continue
			}
			for tool, shows := range conditionTools {
				do(side, f.subject[i], tool, func() bool { return shows(r.T, side, f.kind, f.subject[i]) })
			}
		}
	}
	each(func(side conditionSide, _, tool string, shows func() bool) {
		if shows() {
			r.Errorf("%s of the %s shows %s before the fault", tool, side.kind, f.kind)
		}
	})
	f.begin()
	each(func(side conditionSide, _, tool string, shows func() bool) {
		within(r.T, tool+" of the "+side.kind+" shows "+f.kind, shows)
	})
	for i, side := range sides {
		if f.subject[i] == "" {
			continue
		}
		if out := rnbd(r.T, side.kind, "events", "--socket", side.socket).out; !strings.Contains(out, f.event) {
			r.Errorf("%s: no event %q of the %s in\n%s", f.kind, f.event, side.kind, out)
		}
	}
	rnbd(r.T, "explain", f.kind).want(r.T, 0, "condition")
	if f.end == nil {
		return
	}
	f.end()
	each(func(side conditionSide, _, tool string, shows func() bool) {
		within(r.T, tool+" of the "+side.kind+" does not show "+f.kind+" any longer", func() bool { return !shows() })
	})
}

// TestConditions_EachFaultInEachTool makes faults, and looks for each in every tool that
// shows conditions, and in the events. It is in none of them before and after.
func TestConditions_EachFaultInEachTool(t *testing.T) {
	r := &conditionRig{T: t, disk: slowdisk.New(t, 8<<20), held: make(chan error, 1)}
	l := lab.New(t) // ends before the disk
	extra := []string{"--metrics", "127.0.0.1:0", "--hung-after", "1s"}
	r.server = l.Server(lab.ServerOptions{SearchPath: "/", Addrs: []string{"127.0.0.1", "127.0.0.2"}, Plugins: []string{"fileio"}, Extra: extra})
	r.client = l.Client(lab.ClientOptions{Extra: append(extra, "--loss", "queue:60s")})
	d := l.Map(r.client, strings.TrimPrefix(r.disk.Path(), "/"), r.server)
	r.device, r.user = d.Name, dialNBD(t, r.client, d.Name)
	requests := [2]string{d.Name, r.disk.Path()}
	r.check(conditionFault{"requests-hang", requests, "requests hang", func() {
		r.disk.HoldWrites()
		go func() { _, err := r.user.WriteAt(make([]byte, 4096), 0); r.held <- err }()
	}, func() {
		r.disk.Release()
		if err := <-r.held; err != nil {
			t.Errorf("the write that hung: %v", err)
		}
	}})
	r.check(conditionFault{"redundancy-lost", [2]string{d.Session}, "closed", func() {
		rnbd(t, "path", "disconnect", d.Session, "127.0.0.2", "--socket", r.client.Socket).want(t, 0)
	}, func() {
		rnbd(t, "path", "reconnect", d.Session, "127.0.0.2", "--socket", r.client.Socket).want(t, 0)
	}})
	r.check(conditionFault{"requests-failed", requests, "request failed", func() {
		r.disk.SetError(syscall.ENOSPC)
		if _, err := r.user.WriteAt(make([]byte, 4096), 0); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("a write without room: %v", err)
		}
		r.disk.SetError(0)
	}, nil})
	r.check(conditionFault{"server-away", [2]string{d.Session}, "disconnected", func() {
		if err := r.server.Kill(); err != nil {
			t.Fatal(err)
		}
	}, func() {
		if err := r.server.Start(); err != nil {
			t.Fatal(err)
		}
	}})
	archive := filepath.Join(l.Dir, "bundle.tar.gz")
	rnbd(t, "bundle", archive, "--socket", r.client.Socket).want(t, 0)
	if events := run(t, "tar", "xzOf", archive, "rnbd-bundle/client/events.json"); !strings.Contains(events, "requests hang") {
		t.Errorf("the events of the bundle: %s", events)
	}
}

// within waits for a condition that needs a command to look at.
func within(t *testing.T, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(enough); !f(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", enough, what)
		}
	}
}
