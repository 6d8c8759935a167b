package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// confFolder is a client's folder of files, and a server with the images that they name.
type confFolder struct {
	t      *testing.T
	lab    *lab.T
	server *lab.Server
	path   string
}

func newConfFolder(t *testing.T) *confFolder {
	l := lab.New(t)
	var images string
	for _, name := range []string{"a", "b", "c", "d"} {
		images = l.Image(name+".img", 1<<20)
	}
	f := &confFolder{t: t, lab: l, path: filepath.Join(l.Dir, "client.d")}
	f.server = l.Server(lab.ServerOptions{SearchPath: images, Plugins: []string{"fileio"}})
	if err := os.Mkdir(f.path, 0o755); err != nil {
		t.Fatal(err)
	}
	return f
}

// write writes a file, in which SERVER is the server's address.
func (f *confFolder) write(name, text string) {
	f.t.Helper()
	if err := os.WriteFile(filepath.Join(f.path, name), []byte(strings.ReplaceAll(text, "SERVER", f.server.Addrs[0])), 0o644); err != nil {
		f.t.Fatal(err)
	}
}

// keep writes a sound file.
func (f *confFolder) keep(names ...string) {
	for _, name := range names {
		f.write(name+".yaml", fmt.Sprintf("mappings:\n  - {device: %s.img, server: [\"SERVER\"], name: %s, loss: \"queue:30s\"}\n", name, name))
	}
}

func (f *confFolder) args() []string {
	return []string{"--config-dir", f.path, "--metrics", "127.0.0.1:0"}
}

// openDevices are the names of the devices, and whether each is open.
func openDevices(t *testing.T, c *lab.Client) map[string]bool {
	t.Helper()
	l, err := c.API.ListDevices(t.Context(), &controlpb.ListRequest{})
	if err != nil {
		t.Fatal(err)
	}
	open := map[string]bool{}
	for _, d := range l.Devices {
		open[d.Name] = d.State == "open"
	}
	return open
}

func awaitDevices(t *testing.T, c *lab.Client, names string) {
	t.Helper()
	want := strings.Fields(names)
	sdktest.Eventually(t, "the devices are "+names, func() bool {
		got := openDevices(t, c)
		for _, name := range want {
			if !got[name] {
				return false
			}
		}
		return len(got) == len(want)
	})
}

func configProblems(t *testing.T, c *lab.Client) string {
	t.Helper()
	info, err := c.API.Info(t.Context(), &controlpb.InfoRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(info.ConfigProblems, "\n")
}

// A broken file costs its own mappings, and is shown wherever problems are, until it
// is sound.
func TestABrokenFileCostsItsOwnMappings(t *testing.T) {
	f := newConfFolder(t)
	f.keep("a", "d")
	f.write("b.yaml", "mappings:\n  - {devcie: b.img, server: [\"SERVER\"], name: b}\n  - {device: d.img, server: [\"SERVER\"], name: d2}\n")
	f.write("c.yaml", "mappings:\n  - {device: c.img, server: [\"SERVER\"}\n")
	f.write("e.yaml", "mappings:\n  - {device: c.img, server: [\"SERVER\"], name: b}\n") // the name is in a broken file, too
	c := f.lab.Client(lab.ClientOptions{Extra: f.args()})
	awaitDevices(t, c, "a d")

	const key = `b.yaml: line 2, column 6: unknown key "devcie"; did you mean "device"?`
	syntax := filepath.Join(f.path, "c.yaml") + ": yaml: line 1: did not find expected"
	for _, want := range []string{key, syntax, `the mapping of c.img as "b" is not made`} {
		if said := configProblems(t, c); !strings.Contains(said, want) {
			t.Errorf("the daemon does not show %q, but\n%s", want, said)
		}
		if log := strings.ReplaceAll(c.Log(), `\"`, `"`); !strings.Contains(log, "level=ERROR msg=\"a part of the configuration is left out\"") || !strings.Contains(log, want) {
			t.Errorf("the log does not say %q:\n%s", want, log)
		}
		rnbd(t, "client", "show", "--socket", c.Socket).want(t, 0, want)
		rnbd(t, "client", "events", "--socket", c.Socket).want(t, 0, "config", "left out", want)
	}
	if r := try(t, lab.Patience, filepath.Join(f.lab.Bin, "rnbd"), "doctor", "--socket", c.Socket); r.code != 1 || !strings.Contains(r.out, "problem  configuration client daemon: ") || !strings.Contains(r.out, key) {
		t.Errorf("doctor: %d\n%s", r.code, r.out)
	}
	wantMetric(t, c, "rnbd_client_config_problems 3")
	rnbd(t, "config", "check", "client", f.path).want(t, exitUsage, key, syntax)
	rnbd(t, "config", "apply", "client", "--socket", c.Socket).want(t, exitUsage, key)

	f.keep("b", "c")
	if err := os.Remove(filepath.Join(f.path, "e.yaml")); err != nil {
		t.Fatal(err)
	}
	rnbd(t, "config", "check", "client", f.path).want(t, 0)
	rnbd(t, "config", "apply", "client", "--socket", c.Socket).want(t, 0)
	awaitDevices(t, c, "a b c d")
	if said := configProblems(t, c); said != "" {
		t.Errorf("the daemon still shows %q", said)
	}
	wantMetric(t, c, "rnbd_client_config_problems 0")
}

// Names of the configuration are kept for its mappings while their servers are away: at
// the start, and for those that come with a reload.
func TestNamesOfTheConfigurationAreKept(t *testing.T) {
	f := newConfFolder(t)
	const away = "mappings:\n  - {device: %s.img, server: [\"127.0.0.1:9\"], name: %s}\n"
	f.write("a.yaml", fmt.Sprintf(away, "a", "rnbd0"))
	c := f.lab.Client(lab.ClientOptions{Extra: f.args()})
	mapped := func(image string) string {
		t.Helper()
		r, err := c.API.Map(t.Context(), &controlpb.MapRequest{Path: image, Session: "s", Paths: f.server.Addrs[:1]})
		if err != nil {
			t.Fatal(err)
		}
		return r.Name
	}
	first := mapped("b.img")
	if first == "rnbd0" {
		t.Errorf("a mapping without a name is called %s, as one of the configuration", first)
	}
	f.write("d.yaml", fmt.Sprintf(away, "d", "rnbd1"))
	rnbd(t, "config", "apply", "client", "--socket", c.Socket).want(t, 0)
	if name := mapped("c.img"); name == "rnbd0" || name == "rnbd1" {
		t.Errorf("a mapping without a name is called %s, as one of the configuration", name)
	}
	f.write("a.yaml", strings.ReplaceAll(fmt.Sprintf(away, "a", "rnbd0"), "127.0.0.1:9", "SERVER"))
	rnbd(t, "config", "apply", "client", "--socket", c.Socket).want(t, 0)
	sdktest.Eventually(t, "the first one has its name", func() bool { return openDevices(t, c)["rnbd0"] })

	// One that the reload takes away, to map it from elsewhere, keeps its name, too.
	rnbd(t, "unmap", first, "--socket", c.Socket).want(t, 0)
	f.write("a.yaml", fmt.Sprintf(away, "a", "rnbd0"))
	rnbd(t, "config", "apply", "client", "--socket", c.Socket).want(t, 0)
	if openDevices(t, c)["rnbd0"] {
		t.Fatal("the reload has not taken the changed mapping away")
	}
	for range 5 {
		time.Sleep(100 * time.Millisecond) // its own try has the name, and ends at once
		name := mapped("b.img")
		if name == "rnbd0" {
			t.Fatalf("a mapping without a name is called %s, as one that was changed", name)
		}
		rnbd(t, "unmap", name, "--socket", c.Socket).want(t, 0)
	}
}

func wantMetric(t *testing.T, c *lab.Client, line string) {
	t.Helper()
	r, err := http.Get(pageOf(t, c.Log()) + "metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var page bytes.Buffer
	if _, err := page.ReadFrom(r.Body); err != nil || !strings.Contains(page.String(), "\n"+line+"\n") {
		t.Errorf("no %q among the metrics, %v", line, err)
	}
}

// A file that breaks takes no device away: not by a reload, by command or signal, not
// by an upgrade. After a crash the mappings of other files are made, and its own when
// it is sound again.
func TestAFileThatBreaksTakesNothingAway(t *testing.T) {
	f := newConfFolder(t)
	f.keep("a", "b")
	c := f.lab.Client(lab.ClientOptions{Extra: f.args()})
	awaitDevices(t, c, "a b")
	user, err := nbdclient.Dial(t.Context(), "unix", c.NBD, nbdclient.Options{Export: "b"})
	if err != nil {
		t.Fatal(err)
	}
	defer user.Close()

	for name, text := range map[string]string{
		"an unknown key":   "mappings:\n  - {devcie: b.img, server: [\"SERVER\"], name: b}\n",
		"no YAML":          "mappings:\n  - {device: b.img, server: [\"SERVER\"}\n",
		"the name of two":  "mappings:\n  - {device: b.img, server: [\"SERVER\"], name: a}\n",
		"a setting, wrong": "mappings: []\nslots: many\n",
	} {
		f.write("b.yaml", text)
		rnbd(t, "config", "apply", "client", "--socket", c.Socket).want(t, exitUsage)
		if configProblems(t, c) == "" {
			t.Errorf("%s: the daemon shows no problem after a reload that it refused", name)
		}
		said := strings.Count(c.Log(), "the configuration is not reloaded")
		if err := c.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		sdktest.Eventually(t, name+": the log has the refusal", func() bool { return strings.Count(c.Log(), "the configuration is not reloaded") > said })
		if _, err := c.Upgrade(""); err == nil {
			t.Errorf("%s: the upgrade is not refused", name)
		}
		if got := openDevices(t, c); !got["a"] || !got["b"] || len(got) != 2 {
			t.Errorf("%s: devices %v", name, got)
		}
		if _, err := user.WriteAt(make([]byte, 4096), 0); err != nil {
			t.Fatalf("%s: the user of b: %v", name, err)
		}
	}
	rnbd(t, "client", "events", "--socket", c.Socket).want(t, 0, "refused")

	f.write("b.yaml", "mappings:\n  - {devcie: b.img, server: [\"SERVER\"], name: b}\n")
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	awaitDevices(t, c, "a")
	f.keep("b")
	rnbd(t, "config", "apply", "client", "--socket", c.Socket).want(t, 0)
	awaitDevices(t, c, "a b")
}

// A file that may have had what protects ends the start, of either daemon.
func TestABrokenFileThatMayProtectIsNotLeftOut(t *testing.T) {
	f := newConfFolder(t)
	f.keep("a")
	f.write("b.yaml", "nbd-access:\n  - {identity: [\"psk:a\"], allow: rx}\n")
	_, err := f.lab.StartClient(lab.ClientOptions{Extra: f.args()})
	if err == nil || !strings.Contains(err.Error(), `the daemon does not start without the file, which has, or may have had, more than mappings: line 1: key "nbd-access"`) {
		t.Errorf("the client: %v", err)
	}
	dir := filepath.Join(f.lab.Dir, "server.d")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "rules.yaml"), []byte("acess:\n  - allow: none\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := f.lab.StartServer(lab.ServerOptions{Extra: []string{"--config-dir", dir}}); err == nil || !strings.Contains(err.Error(), `unknown key "acess"; did you mean "access"?`) {
		t.Errorf("the server: %v", err)
	}
}
