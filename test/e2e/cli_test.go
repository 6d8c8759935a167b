package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// The exit codes that scripts rely on.
const (
	exitFailure     = 1
	exitUsage       = 2
	exitNotFound    = 3
	exitExists      = 4
	exitBusy        = 5
	exitUnreachable = 7
	exitTimeout     = 8
)

// rnbd runs the command line.
func rnbd(t *testing.T, args ...string) result {
	t.Helper()
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	return try(t, 15*time.Second, append([]string{filepath.Join(bin, "rnbd")}, args...)...)
}

// want checks the end of a command: its code, and words of its output.
func (r result) want(t *testing.T, code int, words ...string) {
	t.Helper()
	if r.code != code {
		t.Errorf("exit code %d, want %d\n%s%s", r.code, code, r.out, r.err)
	}
	said := r.out
	if code != 0 {
		said = r.err
		if r.out != "" {
			t.Errorf("a failed command prints on standard output: %s", r.out)
		}
	}
	for _, w := range words {
		if !strings.Contains(said, w) {
			t.Errorf("it does not say %q:\n%s", w, said)
		}
	}
	if strings.Contains(r.err, "panic") || strings.Contains(r.err, "goroutine ") {
		t.Errorf("it panicked:\n%s", r.err)
	}
}

// cli runs a command on the client, serverCLI one on the server.
func (r *rig) cli(args ...string) result {
	r.t.Helper()
	return rnbd(r.t, append([]string{"client", "--socket", r.client.Socket}, args...)...)
}

func (r *rig) serverCLI(args ...string) result {
	r.t.Helper()
	return rnbd(r.t, append([]string{"server", "--socket", r.server.Socket}, args...)...)
}

// TestDaemonsRefuseWrongSettings starts daemons that must not come up.
func TestDaemonsRefuseWrongSettings(t *testing.T) {
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	dir := shortDir(t)
	files := settings(t, dir, bin)
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	server := []string{"server", "run", "--socket", filepath.Join(dir, "s.sock"), "--plugin-dir", bin, "--search-path", dir, "--listen", "127.0.0.1:0"}
	client := []string{"client", "run", "--socket", filepath.Join(dir, "c.sock"), "--plugin-dir", bin}
	io := func(path string) []string { return []string{"--io-plugin", "fileio=" + path} }
	for _, c := range []struct {
		name  string
		base  []string
		args  []string
		code  int
		words []string
	}{
		{"unknown flag of the server", server, []string{"--frobnicate"}, exitUsage, []string{"--frobnicate"}},
		{"unknown flag of the client", client, []string{"--frobnicate"}, exitUsage, []string{"--frobnicate"}},
		{"flag without its value", server, []string{"--pumps"}, exitUsage, []string{"--pumps"}},
		{"number that is none", server, []string{"--pumps", "many"}, exitUsage, []string{"--pumps", "many"}},
		{"argument that nobody asked for", server, []string{"now"}, exitUsage, []string{"now"}},
		{"no pumps", server, []string{"--pumps", "0"}, exitUsage, []string{"pumps", "0"}},
		{"chunk size that is no power of two", server, []string{"--chunk-size", "100000"}, exitUsage, []string{"100000"}},
		{"queue depth of zero", server, []string{"--queue-depth", "0"}, exitUsage, []string{"depth"}},
		{"more slots than a ring has entries", client, []string{"--slots", "100000"}, exitUsage, []string{"slots", "100000"}},
		{"log level", server, []string{"--log-level", "loud"}, exitUsage, []string{"--log-level", "loud"}},
		{"log format", client, []string{"--log-format", "xml"}, exitUsage, []string{"--log-format", "xml"}},
		{"policy", client, []string{"--policy", "best"}, exitUsage, []string{"best", "round-robin"}},
		{"loss", client, []string{"--loss", "queue:soon"}, exitUsage, []string{"queue:soon"}},
		{"rule without a plugin", server, []string{"--io-mode", "*.img=nosuch"}, exitUsage, []string{"nosuch"}},
		{"rule that is none", server, []string{"--io-mode", "*.img"}, exitUsage, []string{"GLOB=NAME"}},
		{"rule with a bad pattern", server, []string{"--io-mode", "[=fileio"}, exitUsage, []string{`"["`}},
		{"setting that is none", server, []string{"--io-config", "memory"}, exitUsage, []string{"NAME:KEY=VALUE"}},
		{"setting of a plugin that is not there", server, []string{"--io-config", "nosuch:a=b"}, exitUsage, []string{"nosuch"}},
		{"setting of a front end that is not there", client, []string{"--frontend-config", "nosuch:a=b"}, exitUsage, []string{"nosuch"}},

		{"configuration that is not there", server, []string{"--config", dir + "/none.yaml"}, exitUsage, []string{"none.yaml", "no such file"}},
		{"unknown key in the configuration", server, []string{"--config", files["key"]}, exitUsage, []string{files["key"], "line 3", "frobnicate"}},
		{"wrong type in the configuration", server, []string{"--config", files["type"]}, exitUsage, []string{files["type"], "line 2", "many"}},
		{"list instead of a string in the configuration", client, []string{"--config", files["list"]}, exitUsage, []string{files["list"], "line 1"}},
		{"configuration that is no YAML", client, []string{"--config", files["broken"]}, exitUsage, []string{files["broken"], "line 2"}},
		{"key of the server in the client's configuration", client, []string{"--config", files["server"]}, exitUsage, []string{files["server"], "line 1", "search-path"}},

		{"address to listen on that is none", server, []string{"--listen", "everywhere"}, exitUsage, []string{"--listen everywhere", "ADDRESS:PORT"}},
		{"address without a port", server, []string{"--listen", "127.0.0.1"}, exitUsage, []string{"--listen 127.0.0.1", "ADDRESS:PORT"}},
		{"port out of range", server, []string{"--listen", "127.0.0.1:70000"}, exitUsage, []string{"70000"}},
		{"fabric that is not there", server, []string{"--listen", "carrier://127.0.0.1:0"}, exitUsage, []string{"carrier", "iwarp"}},
		{"port that is taken", server, []string{"--listen", busy.Addr().String()}, exitExists, []string{busy.Addr().String(), "address already in use", "hint:"}},
		{"address of another machine", server, []string{"--listen", "192.0.2.1:1234"}, exitUsage, []string{"192.0.2.1:1234", "cannot assign"}},
		{"NBD address that is none", client, []string{"--nbd-listen", "10809"}, exitUsage, []string{"10809", "tcp:ADDRESS:PORT"}},
		{"NBD port that is taken", client, []string{"--nbd-listen", "tcp:" + busy.Addr().String()}, exitExists, []string{busy.Addr().String(), "address already in use"}},
		{"file in the way of the control socket", []string{"server", "run", "--plugin-dir", bin}, []string{"--socket", files["key"]}, exitExists, []string{files["key"], "no socket"}},

		{"plugin that is not there", server, io(dir + "/none"), exitNotFound, []string{dir + "/none", "no such file"}},
		{"no plugins in the folder", []string{"server", "run", "--socket", filepath.Join(dir, "s.sock")}, []string{"--plugin-dir", dir}, exitUsage, []string{dir, "--plugin-dir"}},
		{"plugin without a name", server, []string{"--io-plugin", "=" + bin + "/io-fileio"}, exitUsage, []string{"NAME=PATH"}},
		{"same plugin twice", server, []string{"--io-plugin", "a=" + bin + "/io-fileio", "--io-plugin", "a=" + bin + "/io-memory"}, exitUsage, []string{`"a"`, "twice"}},
		{"plugin that is a folder", server, io(dir), exitFailure, []string{dir, "not a regular file"}},
		{"plugin that is not executable", server, io(files["key"]), 6, []string{files["key"], "chmod +x"}},
		{"plugin of another protocol", server, io(files["future"]), exitFailure, []string{files["future"], "version 99", "this host version"}},
		{"plugin with another checksum", server, []string{"--io-plugin", "fileio=" + bin + "/io-fileio,sha256=" + strings.Repeat("00", 32)}, exitFailure, []string{bin + "/io-fileio", "SHA-256", strings.Repeat("00", 32)}},
		{"checksum that is none", server, []string{"--io-plugin", "fileio=" + bin + "/io-fileio,sha256=1234"}, exitUsage, []string{"64 hexadecimal digits"}},
		{"front end in place of storage", server, io(bin + "/frontend-nbd"), exitFailure, []string{bin + "/frontend-nbd", "wrong kind", "front-end plugin", "io plugin"}},
		{"storage in place of a front end", client, []string{"--frontend-plugin", "nbd=" + bin + "/io-fileio"}, exitFailure, []string{bin + "/io-fileio", "wrong kind"}},
		{"setting that the plugin does not know", server, []string{"--io-plugin", "memory=" + bin + "/io-memory", "--io-config", "memory:colour=red"}, exitUsage, []string{"colour"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			rnbd(t, append(append([]string{}, c.base...), c.args...)...).want(t, c.code, append(c.words, "rnbd: ")...)
			for _, name := range []string{"s.sock", "c.sock", "nbd.sock"} {
				if _, err := os.Lstat(filepath.Join(dir, name)); err == nil {
					t.Errorf("%s is left behind", name)
				}
			}
		})
	}
}

// settings writes the files that the table needs and returns their paths.
func settings(t *testing.T, dir, bin string) map[string]string {
	t.Helper()
	files := map[string]string{
		"key":    "pumps: 1\n# a comment\nfrobnicate: yes\n",
		"type":   "search-path: /srv\npumps: many\n",
		"list":   "policy: [a, b]\n",
		"broken": "pumps: 1\n  spin: [\n",
		"server": "search-path: /srv\n",
	}
	scripts := map[string]string{
		"future": "#!/bin/sh\necho '1|99|unix|/tmp/none|grpc|'\nexec sleep 30\n",
	}
	paths := map[string]string{}
	for name, text := range files {
		paths[name] = filepath.Join(dir, name+".yaml")
		if err := os.WriteFile(paths[name], []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range scripts {
		paths[name] = filepath.Join(dir, name)
		if err := os.WriteFile(paths[name], []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return paths
}

// shortDir returns a folder with a name short enough for sockets in it.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "e2e-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// TestCommandLineWinsOverConfiguration has both say something about the same.
func TestCommandLineWinsOverConfiguration(t *testing.T) {
	dir := shortDir(t)
	config := filepath.Join(dir, "server.yaml")
	text := "pumps: 3\nqueue-depth: 64\nlisten: [\"127.0.0.9:1\"]\nlog-format: json\n"
	if err := os.WriteFile(config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}, Extra: []string{"--config", config, "--pumps", "1"}})
	c := l.Client(lab.ClientOptions{})
	l.Map(c, "disk.img", s)
	var info struct {
		Pumps  int
		Listen []string
	}
	r := rnbd(t, "server", "--socket", s.Socket, "show", "--output", "json")
	r.want(t, 0)
	if err := json.Unmarshal([]byte(r.out), &info); err != nil {
		t.Fatal(err)
	}
	if info.Pumps != 1 || len(info.Listen) != 1 || info.Listen[0] != "iwarp://"+s.Addrs[0] {
		t.Errorf("the server has %+v, want what the command line says", info)
	}
	if d := sessionsOf(t, c)[0].QueueDepth; d != 64 {
		t.Errorf("queue depth %d, want 64 of the file", d)
	}
	if !strings.HasPrefix(s.Log(), "{") {
		t.Errorf("the log is not JSON, as the file says: %.80s", s.Log())
	}
}

// TestMapAndUnmapAnswerInExitCodes is the life of a device on the command line.
func TestMapAndUnmapAnswerInExitCodes(t *testing.T) {
	r := newRig(t, rigOptions{size: 1 << 20})
	r.Image("second.img", 1<<20)
	addr := r.server.Addrs[0]
	closed := closedPort(t)
	for _, c := range []struct {
		name  string
		args  []string
		code  int
		words []string
	}{
		{"no address", []string{"device", "map", "second.img"}, exitUsage, []string{"from ADDRESS"}},
		{"a word instead of from", []string{"device", "map", "second.img", "at", addr}, exitUsage, []string{"from ADDRESS"}},
		{"an address that is none", []string{"device", "map", "second.img", "from", "server.example"}, exitUsage, []string{"server.example", "IP address"}},
		{"port out of range", []string{"device", "map", "second.img", "from", "127.0.0.1:99999"}, exitUsage, []string{"127.0.0.1:99999"}},
		{"source of another family", []string{"device", "map", "second.img", "from", "::1@127.0.0.1"}, exitUsage, []string{"families"}},
		{"fabric that is not there", []string{"device", "map", "second.img", "from", addr + "%carrier"}, exitUsage, []string{"carrier"}},
		{"nobody listens", []string{"device", "map", "second.img", "from", closed}, exitUnreachable, []string{closed, "connection refused", "hint:", "--listen"}},
		{"name that is not there", []string{"device", "map", "none.img", "from", addr}, exitNotFound, []string{"none.img"}},
		{"name that leads out", []string{"device", "map", "../../etc/passwd", "from", addr}, exitUsage, []string{"etc/passwd"}},
		{"name that is empty", []string{"device", "map", "", "from", addr}, exitUsage, []string{"1 to 254"}},
		{"name that is too long", []string{"device", "map", strings.Repeat("x", 300), "from", addr}, exitUsage, []string{"1 to 254"}},
		{"mapped already", []string{"device", "map", "disk.img", "from", addr}, exitExists, []string{r.device.Name}},
		{"mapped already, by session", []string{"device", "map", "disk.img", "--session", r.device.Session}, exitExists, []string{r.device.Name}},
		{"name is taken", []string{"device", "map", "second.img", "from", addr, "--name", r.device.Name}, exitExists, []string{r.device.Name}},
		{"name with a slash", []string{"device", "map", "second.img", "from", addr, "--name", "a/b"}, exitUsage, []string{"slash"}},
		{"access that is none", []string{"device", "map", "second.img", "from", addr, "--access", "wo"}, exitUsage, []string{"wo"}},
		{"loss that is none", []string{"device", "map", "second.img", "from", addr, "--loss", "never"}, exitUsage, []string{"never"}},
		{"front end that is not there", []string{"device", "map", "second.img", "from", addr, "--frontend", "nosuch"}, exitUsage, []string{"nosuch"}},
		{"session that is not there", []string{"device", "map", "second.img", "--session", "none"}, exitNotFound, []string{"none"}},
		{"device that is not there", []string{"device", "unmap", "rnbd9"}, exitNotFound, []string{"rnbd9"}},
		{"show of what is not there", []string{"device", "show", "rnbd9"}, exitNotFound, []string{"rnbd9"}},
		{"remap of what is not there", []string{"device", "remap", "rnbd9"}, exitNotFound, []string{"rnbd9"}},
		{"output that is none", []string{"device", "list", "--output", "toml"}, exitUsage, []string{"table, csv, json, xml, yaml"}},
		{"output that is none, before anything is done", []string{"device", "unmap", r.device.Name, "--output", "toml"}, exitUsage, []string{"toml"}},
		{"path of no session", []string{"path", "add", "none", addr}, exitNotFound, []string{"none"}},
		{"path that is none", []string{"path", "remove", r.device.Session, "first"}, exitNotFound, []string{"first"}},
		{"path that is not there", []string{"path", "remove", r.device.Session, "77"}, exitNotFound, []string{"77"}},
		{"policy that is none", []string{"session", "set", r.device.Session, "mp_policy=best"}, exitUsage, []string{"best"}},
		{"setting that is none", []string{"session", "set", r.device.Session, "colour=red"}, exitUsage, []string{"colour"}},
		{"command that is none", []string{"device", "mapp"}, exitUsage, []string{"mapp"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.cli(c.args...).want(t, c.code, append(c.words, "rnbd: ")...)
		})
	}
	if d, err := r.client.Device(r.device.Name); err != nil || d.State != "open" {
		t.Errorf("the device is %v, %v", d, err)
	}
	if got := devicesOf(t, r); len(got) != 1 {
		t.Errorf("devices left by mappings that failed: %v", got)
	}

	r.cli("device", "map", "second.img", "from", addr, "--name", "two").want(t, 0, "second.img", "two")
	r.cli("device", "list").want(t, 0, "Mapping Path", r.device.Name, "two")
	n := r.dial()
	r.cli("device", "unmap", r.device.Name).want(t, exitBusy, r.device.Name, "--force")
	if _, err := n.WriteAt(make([]byte, 512), 0); err != nil {
		t.Errorf("the device was refused to be unmapped, and does not work any more: %v", err)
	}
	r.cli("device", "unmap", r.device.Name, "--force").want(t, 0)
	if _, err := n.WriteAt(make([]byte, 512), 0); err == nil {
		t.Error("the device was unmapped by force, and still works")
	}
	r.cli("device", "unmap", r.device.Name, "--force").want(t, exitNotFound)
	r.cli("device", "unmap", "two").want(t, 0)
	r.cli("device", "unmap", "two").want(t, exitNotFound, "two")
	eventually(t, "the server has no session any more", func() bool {
		l := r.serverCLI("session", "list")
		return l.code == 0 && strings.Count(l.out, "\n") == 1
	})
	r.cli("device", "map", "disk.img", "from", addr).want(t, 0) // once more
}

// closedPort is an address that nobody listens on.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

func devicesOf(t *testing.T, r *rig) (names []string) {
	t.Helper()
	res := r.cli("device", "list", "--output", "json")
	res.want(t, 0)
	var list []struct{ Devname string }
	if err := json.Unmarshal([]byte(res.out), &list); err != nil {
		t.Fatal(err)
	}
	for _, d := range list {
		names = append(names, d.Devname)
	}
	return names
}

// TestTimeoutEndsACommandAndNothingElse maps from a peer that never answers.
func TestTimeoutEndsACommandAndNothingElse(t *testing.T) {
	r := newRig(t, rigOptions{size: 1 << 20})
	mute, err := net.Listen("tcp", "127.0.0.1:0") // accepts in its backlog, says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	start := time.Now()
	r.cli("device", "map", "a.img", "from", mute.Addr().String(), "--timeout", "1s").want(t, exitTimeout)
	if d := time.Since(start); d < time.Second || d > 10*time.Second {
		t.Errorf("it took %v, want 1 s", d)
	}
	r.Image("second.img", 1<<20)
	r.cli("device", "map", "second.img", "from", r.server.Addrs[0], "--timeout", "20s").want(t, 0)
	if got := devicesOf(t, r); len(got) != 2 {
		t.Errorf("devices: %v", got)
	}
}

// TestJSONHasStableFields holds the fields that scripts read.
func TestJSONHasStableFields(t *testing.T) {
	r := newRig(t, rigOptions{size: 1 << 20})
	object := func(r result) map[string]any {
		t.Helper()
		r.want(t, 0)
		var o map[string]any
		if err := json.Unmarshal([]byte(r.out), &o); err != nil {
			t.Fatalf("%v\n%s", err, r.out)
		}
		return o
	}
	list := func(r result) map[string]any {
		t.Helper()
		r.want(t, 0)
		var o []map[string]any
		if err := json.Unmarshal([]byte(r.out), &o); err != nil || len(o) != 1 {
			t.Fatalf("%v\n%s", err, r.out)
		}
		return o[0]
	}
	j := []string{"--output", "json"}
	device := object(r.cli(append(j, "device", "show", r.device.Name)...))
	exported := list(r.serverCLI(append(j, "device", "list", "all")...))
	session := list(r.cli(append(j, "session", "list", "all")...))
	path := list(r.cli("path", "list", "json", "all"))
	info := object(r.cli(append(j, "show")...))
	const fields = "sessname mapping_path devname devpath state access_mode rx_sect tx_sect direction hostname size endpoint plugin id loss openers inflights logical_block physical_block max_io write_cache fua max_discard max_write_zeroes last_error"
	for _, c := range []struct {
		what string
		got  map[string]any
		want string
	}{
		{"a device", device, fields},
		{"a device of the server", exported, fields},
		{"a session", session, "sessname path_cnt act_path_cnt state path_uu mp mp_short rx_bytes tx_bytes inflights reconnects direction srvname hostname devices queue_depth max_io max_reconnects paths"},
		{"a path", path, "sessname pathname src_addr dst_addr hca_name hca_port state rx_bytes tx_bytes inflights reconnects direction hostname id fabric connections failovers latency last_error"},
		{"a daemon", info, "kind listen pid plugins pumps version"},
		{"a plugin", info["plugins"].([]any)[0].(map[string]any), "kind name path pid restarts state version"},
	} {
		for _, key := range strings.Fields(c.want) { // there may be more
			if _, ok := c.got[key]; !ok {
				t.Errorf("%s has no field %s: %v", c.what, key, c.got)
			}
		}
	}
	if device["state"] != "open" || device["devname"] != r.device.Name || device["size"] != 1048576.0 {
		t.Errorf("device: %v", device)
	}

	fail := r.cli(append(j, "device", "unmap", "none")...)
	var e struct {
		Error, Hint string
		Causes      []string
		Errno, Code int
	}
	if err := json.Unmarshal([]byte(fail.err), &e); err != nil || len(e.Causes) < 2 || e.Causes[len(e.Causes)-1] != "no such file or directory" || e.Code != exitNotFound || e.Errno != 2 || !strings.Contains(e.Error, "none") {
		t.Errorf("error as JSON: %v, %s", err, fail.err)
	}
}

// TestCommandsWithoutADaemonSayHowToStartOne also has the commands that work
// without.
func TestCommandsWithoutADaemonSayHowToStartOne(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none.sock")
	for _, kind := range []string{"client", "server"} {
		rnbd(t, kind, "device", "list", "--socket", none).want(t, exitUnreachable, none, "rnbd server run")
	}
	rnbd(t, "version").want(t, 0, "rnbd ", "go1.", "iwarp")
	list := rnbd(t, "exit-codes")
	list.want(t, 0)
	for code := range 9 {
		if !strings.Contains(list.out, fmt.Sprintf("%d  ", code)) {
			t.Errorf("exit-codes does not list %d:\n%s", code, list.out)
		}
	}
	rnbd(t, "nonsense").want(t, exitUsage, "nonsense")
	rnbd(t, "--nonsense").want(t, exitUsage, "--nonsense")
	rnbd(t, "version", "--output", "toml").want(t, exitUsage, "toml")
	rnbd(t, "server", "device", "close", "a", "b", "c", "--socket", none).want(t, exitUsage, `"c"`)
}

// TestTwoDaemonsDoNotShareASocket starts second ones beside running ones.
func TestTwoDaemonsDoNotShareASocket(t *testing.T) {
	r := newRig(t, rigOptions{size: 1 << 20})
	bin := r.Bin
	rnbd(t, "server", "run", "--socket", r.server.Socket, "--plugin-dir", bin, "--listen", "127.0.0.1:0").
		want(t, exitExists, r.server.Socket, "another daemon")
	rnbd(t, "client", "run", "--socket", r.client.Socket, "--plugin-dir", bin).
		want(t, exitExists, r.client.Socket, "another daemon")
	rnbd(t, "client", "run", "--socket", r.client.Socket+"2", "--plugin-dir", bin, "--nbd-listen", "unix:"+r.client.NBD).
		want(t, exitExists, r.client.NBD, "somebody serves there")
	if _, err := r.dial().WriteAt(make([]byte, 512), 0); err != nil {
		t.Errorf("the device of the first daemon does not work any more: %v", err)
	}
	r.cli("device", "list").want(t, 0, r.device.Name)
	r.serverCLI("device", "list").want(t, 0, "disk.img")
}
