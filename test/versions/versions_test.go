package versions

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// patience bounds what will happen soon.
const patience = time.Minute

// pairing is a client and a server, each of one version.
type pairing struct {
	name           string
	client, server string // folders of programs
}

func pairings(t *testing.T) []pairing {
	was := oldBin(t)
	now, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	return []pairing{{"old client, server of today", was, now}, {"client of today, old server", now, was}, {"both old", was, was}}
}

// rig is a mapped device of a pairing.
type rig struct {
	t      *testing.T
	server *lab.Server
	client *lab.Client
	image  string
	device string
	nbd    *nbdclient.Client
}

// fabrics are the addresses where servers listen and the paths that lead there.
var fabrics = map[string]func() (listen []string, path string){
	"iwarp": func() ([]string, string) { return nil, "" },
	"rocev2": func() ([]string, string) {
		return []string{"rocev2://" + lab.LoopbackAddr(1) + ":4791"}, lab.LoopbackAddr(2) + "@" + lab.LoopbackAddr(1) + ":4791%rocev2"
	},
}

func newRig(t *testing.T, p pairing, fabric, loss string) *rig {
	t.Helper()
	l := lab.New(t)
	listen, path := fabrics[fabric]()
	dir := l.Image("disk.img", 16<<20)
	r := &rig{t: t, image: filepath.Join(dir, "disk.img")}
	l.Bin = p.server
	r.server = l.Server(lab.ServerOptions{SearchPath: dir, Listen: listen})
	l.Bin = p.client
	r.client = l.Client(lab.ClientOptions{})
	r.device = l.Map(r.client, "disk.img", r.server, func(q *controlpb.MapRequest) {
		if q.Loss = loss; path != "" {
			q.Paths = []string{path}
		}
	}).Name
	r.dial()
	return r
}

func (r *rig) dial() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	var err error
	if r.nbd, err = nbdclient.Dial(ctx, "unix", r.client.NBD, nbdclient.Options{Export: r.device}); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { r.nbd.Close() })
}

// mustWork writes blocks of all sizes, and reads them.
func (r *rig) mustWork(seed byte) {
	r.t.Helper()
	for i, n := range []int{512, 4096, 100 << 10, 1 << 20} {
		want, got := bytes.Repeat([]byte{seed, byte(i)}, n/2), make([]byte, n)
		if _, err := r.nbd.WriteAt(want, int64(i)<<21); err != nil {
			r.t.Fatalf("write of %d bytes: %v", n, err)
		}
		if _, err := r.nbd.ReadAt(got, int64(i)<<21); err != nil || !bytes.Equal(got, want) {
			r.t.Fatalf("read of %d bytes: %v, equal %t", n, err, bytes.Equal(got, want))
		}
	}
	for name, err := range map[string]error{"flush": r.nbd.Flush(), "trim": r.nbd.Trim(8<<20, 1<<20), "write zeroes": r.nbd.WriteZeroes(9<<20, 1<<20, 0)} {
		if err != nil {
			r.t.Errorf("%s: %v", name, err)
		}
	}
}

// Each version serves the other one: data, a new size, a restart of the server with
// requests that wait, and the end.
func TestDaemonsOfTwoVersions(t *testing.T) {
	for _, p := range pairings(t) {
		for fabric := range fabrics {
			t.Run(p.name+", "+fabric, func(t *testing.T) {
				r := newRig(t, p, fabric, "queue:60s")
				r.mustWork(1)
				if err := os.Truncate(r.image, 32<<20); err != nil {
					t.Fatal(err)
				}
				sdktest.Within(t, patience, "the new size arrives", func() bool {
					d, err := r.client.Device(r.device)
					return err == nil && d.Limits.GetSize() == 32<<20
				})
				if err := r.server.Stop(); err != nil {
					t.Fatal(err)
				}
				wrote := make(chan error, 1)
				go func() { _, err := r.nbd.WriteAt(bytes.Repeat([]byte{7}, 4096), 12<<20); wrote <- err }()
				if err := r.server.Start(); err != nil {
					t.Fatal(err)
				}
				if err := <-wrote; err != nil {
					t.Errorf("a write that waited for the server: %v", err)
				}
				r.mustWork(2)
				if err := r.client.Unmap(r.device, true); err != nil {
					t.Error(err)
				}
				if b, err := os.ReadFile(r.image); err != nil || !bytes.Equal(b[12<<20:12<<20+4096], bytes.Repeat([]byte{7}, 4096)) {
					t.Errorf("the image does not hold what was written: %v", err)
				}
			})
		}
	}
}

// The server changes its version under a client, back and forth, as far as it goes
// without a command that the old one does not have.
func TestServerChangesItsVersion(t *testing.T) {
	was := oldBin(t)
	now, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	for name, client := range map[string]string{"old client": was, "client of today": now} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, pairing{client: client, server: was}, "iwarp", "queue:60s")
			for i, bin := range []string{now, was, now} {
				r.server.Bin(bin)
				if err := r.server.Stop(); err != nil {
					t.Fatal(err)
				}
				if err := r.server.Start(); err != nil {
					t.Fatal(err)
				}
				r.mustWork(byte(i))
			}
			if _, err := r.server.Upgrade(""); err != nil { // this version has the command
				t.Fatal(err)
			}
			r.mustWork(9)
			if _, err := r.server.API.Upgrade(t.Context(), &controlpb.UpgradeRequest{Binary: filepath.Join(was, "rnbd")}); err == nil {
				t.Error("a program that cannot be handed over to has taken over")
			}
			r.mustWork(10)
		})
	}
}

// A daemon's plugins may be of the other version.
func TestPluginsOfTheOtherVersion(t *testing.T) {
	for _, p := range pairings(t)[:2] {
		t.Run("plugins: "+p.name, func(t *testing.T) {
			l := lab.New(t)
			dir := l.Image("disk.img", 16<<20)
			r := &rig{t: t, image: filepath.Join(dir, "disk.img")}
			l.Bin = p.client // whose plugins the daemons do not get
			r.server = l.Server(lab.ServerOptions{SearchPath: dir, Extra: []string{"--plugin-dir", p.server}})
			r.client = l.Client(lab.ClientOptions{Extra: []string{"--plugin-dir", p.server}})
			r.device = l.Map(r.client, "disk.img", r.server).Name
			r.dial()
			r.mustWork(3)
			if err := r.server.KillPlugin("fileio"); err != nil {
				t.Fatal(err)
			}
			r.mustWork(4)
		})
	}
}

// The command of one version asks a daemon of the other.
func TestCommandsOfTheOtherVersion(t *testing.T) {
	for _, p := range pairings(t)[:2] {
		t.Run("daemons: "+p.name, func(t *testing.T) {
			r := newRig(t, p, "iwarp", "fail")
			r.mustWork(5)
			for _, bin := range []string{p.client, p.server} {
				for socket, words := range map[string][]string{
					r.client.Socket: {"client list json", "client show " + r.device + " json", "client session list", "client path list"},
					r.server.Socket: {"server list json", "server show", "server session list"},
				} {
					for _, w := range words {
						out, err := exec.Command(filepath.Join(bin, "rnbd"), append([]string{"--socket", socket}, strings.Fields(w)...)...).CombinedOutput()
						if err != nil || len(out) == 0 {
							t.Errorf("%s of %s: %v\n%s", w, bin, err, out)
						}
					}
				}
			}
		})
	}
}

// yamlExample is an example of a configuration file in a document: its kind, and the text.
var yamlExample = regexp.MustCompile("(?s)```yaml\n(# /etc/rnbd/(client|server)\\..*?)```")

// The examples in the last release's documents are still accepted.
func TestConfigurationOfTheLastRelease(t *testing.T) {
	oldBin(t)
	if old.src == "" {
		t.Skip("RNBD_OLD_BIN has programs only")
	}
	now, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join(old.src, "docs/use/operations.md"))
	if errors.Is(err, fs.ErrNotExist) { // where 0.1.0 has the page
		page, err = os.ReadFile(filepath.Join(old.src, "docs/operations.md"))
	}
	if err != nil {
		t.Fatal(err)
	}
	examples := yamlExample.FindAllSubmatch(page, -1)
	if len(examples) < 2 {
		t.Fatalf("%d examples in the last release's operations.md", len(examples))
	}
	for _, e := range examples {
		file := filepath.Join(t.TempDir(), "example.yaml")
		if err := os.WriteFile(file, e[1], 0o644); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(filepath.Join(now, "rnbd"), "config", "check", string(e[2]), file).CombinedOutput(); err != nil {
			t.Errorf("%s\n%v: %s", e[1], err, out)
		}
	}
}

// A client of one version finds the disks of the other's in its state file.
func TestStateFiles(t *testing.T) {
	oldBin(t)
	if old.src == "" {
		t.Skip("RNBD_OLD_BIN has programs only")
	}
	const module, file = "modules/rnbd-client", "state_versions_test.go"
	text, err := os.ReadFile(filepath.Join(lab.Root(), module, file))
	if err != nil {
		t.Fatal(err)
	}
	// The types of the file had other names in 0.1.
	text = []byte(strings.NewReplacer("&deviceFacts{", "&known{", "sessionTuning", "tuning", ".mapRequest()", ".request()").Replace(string(text)))
	if err := os.WriteFile(filepath.Join(old.src, module, file), text, 0o644); err != nil {
		t.Fatal(err)
	}
	trees := map[string]string{"today": lab.Root(), "the last release": old.src}
	run := func(version, variable, state string) {
		t.Helper()
		c := exec.Command("go", "test", "-count=1", "-run", "TestStateOfAnotherVersion", ".")
		c.Dir = filepath.Join(trees[version], module)
		c.Env = append(os.Environ(), "GOFLAGS=", "GOWORK="+filepath.Join(trees[version], "go.work"), variable+"="+state)
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("%s of %s: %v\n%s", variable, version, err, out)
		}
	}
	for writer := range trees {
		state := filepath.Join(t.TempDir(), "client.devices")
		run(writer, "RNBD_STATE_WRITE", state)
		if _, err := os.Stat(state); err != nil {
			t.Fatalf("%s has written nothing: %v", writer, err)
		}
		for reader := range trees {
			run(reader, "RNBD_STATE_READ", state)
		}
	}
}
