package e2e

import (
	"encoding/json"
	"io"
	"net/http"
	"path/filepath"
	"strings"
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

// tools are those that show conditions: each returns the kinds that it shows with a
// subject.
var conditionTools = map[string]func(r *conditionRig, kind, subject string) bool{
	"doctor": func(r *conditionRig, kind, subject string) bool {
		got := rnbd(r.T, "doctor", "--socket", r.client.Socket)
		return strings.Contains(got.out, "rnbd explain "+kind+"\n") && strings.Contains(got.out, subject) && got.code == 1
	},
	"show": func(r *conditionRig, kind, subject string) bool {
		return strings.Contains(rnbd(r.T, "client", "show", "conditions", "csv", "--socket", r.client.Socket).out, kind+" "+subject+":")
	},
	"metrics": func(r *conditionRig, kind, subject string) bool {
		return strings.Contains(r.page("metrics"), `rnbd_client_condition{kind="`+kind+`",subject="`+subject+`"} 1`)
	},
	"status page": func(r *conditionRig, kind, subject string) bool {
		var state struct {
			Conditions []struct{ Kind, Subject string }
		}
		if err := json.Unmarshal([]byte(r.page("status.json")), &state); err != nil {
			r.Fatal(err)
		}
		for _, c := range state.Conditions {
			if c.Kind == kind && c.Subject == subject {
				return true
			}
		}
		return false
	},
}

func (r *conditionRig) page(name string) string {
	answer, err := http.Get(pageOf(r.T, r.client.Log()) + name)
	if err != nil {
		r.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		r.Fatal(err)
	}
	return string(text)
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
	for _, f := range []struct {
		kind, subject, event string
		begin, end           func()
	}{
		{"requests-hang", d.Name, "requests hang", func() {
			r.disk.HoldWrites()
			go func() { _, err := r.user.WriteAt(make([]byte, 4096), 0); r.held <- err }()
		}, func() {
			r.disk.Release()
			if err := <-r.held; err != nil {
				t.Errorf("the write that hung: %v", err)
			}
		}},
		{"redundancy-lost", d.Session, "closed", func() {
			rnbd(t, "path", "disconnect", d.Session, "127.0.0.2", "--socket", r.client.Socket).want(t, 0)
		}, func() {
			rnbd(t, "path", "reconnect", d.Session, "127.0.0.2", "--socket", r.client.Socket).want(t, 0)
		}},
		{"server-away", d.Session, "disconnected", func() {
			if err := r.server.Kill(); err != nil {
				t.Fatal(err)
			}
		}, func() {
			if err := r.server.Start(); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		for tool, shows := range conditionTools {
			if shows(r, f.kind, f.subject) {
				t.Errorf("%s shows %s before the fault", tool, f.kind)
			}
		}
		f.begin()
		for tool, shows := range conditionTools {
			within(t, tool+" shows "+f.kind, func() bool { return shows(r, f.kind, f.subject) })
		}
		if out := rnbd(t, "client", "events", "--socket", r.client.Socket).out; !strings.Contains(out, f.event) {
			t.Errorf("%s: no event %q in\n%s", f.kind, f.event, out)
		}
		rnbd(t, "explain", f.kind).want(t, 0, "condition")
		f.end()
		for tool, shows := range conditionTools {
			within(t, tool+" does not show "+f.kind+" any longer", func() bool { return !shows(r, f.kind, f.subject) })
		}
	}
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
