package faults

import (
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// The daemons and their plugins hold no more after much work than after a
// little of it: memory, descriptors, threads, goroutines, mappings, files.

// endurance is a server, a client and the resources that their processes held
// at first.
type endurance struct {
	t       *testing.T
	lab     *lab.T
	server  *lab.Server
	client  *lab.Client
	metrics string
	tmp     string               // the processes' temporary folder
	base    map[string]lab.Usage // by name of the process
	files   map[string]int       // how many of a name, see left
}

func newEndurance(t *testing.T) *endurance {
	e := &endurance{t: t, lab: lab.New(t)}
	e.metrics = filepath.Join(e.lab.Dir, "metrics")
	e.tmp = filepath.Join(e.lab.Dir, "tmp")
	if err := os.Mkdir(e.tmp, 0o700); err != nil {
		t.Fatal(err)
	}
	env := []string{lab.MetricsEnv(e.metrics), "TMPDIR=" + e.tmp}
	e.lab.Image("held.img", 16<<20)
	e.server = e.lab.Server(lab.ServerOptions{
		SearchPath: e.lab.Image("cycle.img", 16<<20), Plugins: []string{"fileio"}, Env: env,
		Addrs: []string{"127.0.0.1", "127.0.0.2"}, Extra: []string{"--crash-limit", "1000000"},
	})
	e.client = e.lab.Client(lab.ClientOptions{Env: env})
	return e
}

// processes are those that run now, by name.
func (e *endurance) processes() map[string]int {
	e.t.Helper()
	pids := map[string]int{"server": e.server.PID(), "client": e.client.PID()}
	storage, err := e.server.Plugin("fileio")
	if err != nil {
		e.t.Fatal(err)
	}
	front, err := e.client.Plugin("nbd")
	if err != nil {
		e.t.Fatal(err)
	}
	pids["io-fileio"], pids["frontend-nbd"] = int(storage.Pid), int(front.Pid)
	return pids
}

func (e *endurance) usage() map[string]lab.Usage {
	e.t.Helper()
	all := map[string]lab.Usage{}
	for name, pid := range e.processes() {
		u, err := lab.UsageOf(e.metrics, pid)
		if err != nil {
			e.t.Fatalf("%s: %v", name, err)
		}
		all[name] = u
	}
	return all
}

// begin records the resources held now; growth from here on is judged.
func (e *endurance) begin() {
	e.t.Helper()
	e.base, e.files = e.usage(), e.left()
	for name, u := range e.base {
		e.t.Logf("%s begins with %v", name, u)
	}
}

// end waits until the processes hold no more than at the beginning, except
// for what the Go runtime retains: memory that is not given back at once, and
// idle threads.
func (e *endurance) end() {
	e.t.Helper()
	var grown []string
	defer func() {
		for name, u := range e.usage() {
			e.t.Logf("%s ends with %v", name, u)
		}
	}()
	for deadline := time.Now().Add(enough); ; time.Sleep(100 * time.Millisecond) {
		grown = nil
		for name, u := range e.usage() {
			grown = append(grown, growth(name, e.base[name], u)...)
		}
		for name, n := range e.left() {
			if n > e.files[name] {
				grown = append(grown, fmt.Sprintf("%d files %s, and %d at the beginning", n, name, e.files[name]))
			}
		}
		if len(grown) == 0 {
			return
		}
		if time.Now().After(deadline) {
			e.t.Error(strings.Join(grown, "\n"))
			return
		}
	}
}

// growth compares two moments of a process. Memory may grow by the amount
// that a heap of this size keeps between two collections.
func growth(name string, from, to lab.Usage) (grown []string) {
	for _, c := range []struct {
		what     string
		from, to int
		slack    int
	}{
		{"resident bytes", from.Anonymous, to.Anonymous, 24 << 20},
		{"bytes of heap", from.Heap, to.Heap, 4 << 20},
		{"goroutines", from.Goroutines, to.Goroutines, 4},
		{"threads", from.Threads, to.Threads, 12},
		{"descriptors", from.Descriptors, to.Descriptors, 2},
		{"mappings", from.Mappings, to.Mappings, 40},
	} {
		if c.to > c.from+c.slack {
			grown = append(grown, fmt.Sprintf("%s: %s grew from %d to %d", name, c.what, c.from, c.to))
		}
	}
	return grown
}

// left counts the files of the lab, the processes' temporary files among them,
// but those that the test makes. Random numbers in names are left out.
func (e *endurance) left() map[string]int {
	files := map[string]int{}
	filepath.WalkDir(e.lab.Dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !strings.HasPrefix(path, e.metrics) && !strings.HasSuffix(path, ".log") {
			files[digits.ReplaceAllString(strings.TrimPrefix(path, e.lab.Dir), "#")]++
		}
		return nil
	})
	return files
}

var digits = regexp.MustCompile(`[0-9]+`)

// cycle maps a device, reads from it and takes it away again.
func (e *endurance) cycle(with ...func(*controlpb.MapRequest)) {
	e.t.Helper()
	d := e.lab.Map(e.client, "cycle.img", e.server, with...)
	n, err := dialDevice(e.client, d.Name)
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := n.ReadAt(make([]byte, 4096), 0); err != nil {
		e.t.Fatal(err)
	}
	n.Close()
	if err := e.client.Unmap(d.Name, false); err != nil {
		e.t.Fatal(err)
	}
}

func TestEndurance_MapAndUnmap(t *testing.T) {
	e := newEndurance(t)
	e.lab.Map(e.client, "held.img", e.server) // the session stays
	e.cycles(pick(100, 10000))
}

func TestEndurance_Sessions(t *testing.T) {
	newEndurance(t).cycles(pick(25, 1000)) // each ends with its only device
}

// cycles warms up and runs n cycles between begin and end.
func (e *endurance) cycles(n int) {
	for range 20 {
		e.cycle()
	}
	e.begin()
	at := time.Now()
	for i := range n {
		e.cycle()
		if (i+1)%1000 == 0 {
			e.t.Logf("%s: %d cycles in %v", time.Now().Format(time.TimeOnly), i+1, time.Since(at).Round(time.Second))
		}
	}
	e.t.Logf("%d cycles in %v", n, time.Since(at).Round(time.Millisecond))
	e.end()
}

// The daemons stay the same processes, their plugins, paths and connections do
// not.
func TestEndurance_LoadWithFaults(t *testing.T) {
	e := newEndurance(t)
	d := e.lab.Map(e.client, "held.img", e.server, func(r *controlpb.MapRequest) { r.Loss = "queue:60s" })
	p := &paths{t: t, lab: e.lab, server: e.server, client: e.client, session: d.Session, device: d.Name}
	w := startLoad(t, e.client, d.Name, loadOptions{reconnect: true})
	w.awaitProgress(500)
	faults := []func(){
		func() { killPlugin(t, e.server, "fileio") },
		func() { e.killFrontend() },
		func() { p.bounce(e.server.Addrs[rand.IntN(2)]) },
		func() { e.cycle() },
	}
	for _, fault := range faults { // each has been once before it is counted
		fault()
		w.awaitProgress(100)
	}
	e.begin()
	n := 0
	for end := time.Now().Add(time.Duration(pick(8, 3600)) * time.Second); time.Now().Before(end) && !t.Failed(); n++ {
		faults[rand.IntN(len(faults))]()
		w.awaitProgress(100)
		if n%500 == 499 {
			t.Logf("%s: %d faults, %d requests: server %v; client %v", time.Now().Format(time.TimeOnly), n+1, w.ops.Load(), e.usage()["server"], e.usage()["client"])
		}
	}
	w.awaitProgress(100)
	e.end()
	w.stop()
	t.Logf("%d faults, %d requests answered", n, w.ops.Load())
}

func (e *endurance) killFrontend() {
	e.t.Helper()
	before, err := e.client.Plugin("nbd")
	if err != nil {
		e.t.Fatal(err)
	}
	if err := e.client.KillPlugin("nbd"); err != nil {
		e.t.Fatal(err)
	}
	eventually(e.t, 2*enough, "the killed front end runs again", func() bool {
		p, err := e.client.Plugin("nbd")
		return err == nil && p.Pid != 0 && p.Pid != before.Pid
	})
}

// bounce takes a path away and has it connected again.
func (p *paths) bounce(addr string) {
	p.t.Helper()
	p.change("disconnect", addr)
	p.change("reconnect", addr)
	p.awaitState(addr, "connected")
}
