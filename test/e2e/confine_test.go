package e2e

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// hostileServer runs a server whose devices "WHAT:ARGUMENT" are attempts of a hostile
// plugin, and returns a function that makes one.
func hostileServer(t *testing.T, l *lab.T, searchPath string, flags ...string) (*lab.Server, func(what string) error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := l.Server(lab.ServerOptions{SearchPath: searchPath, Plugins: []string{"fileio"},
		Extra: append([]string{"--io-plugin", "hostile=" + self, "--io-mode", "*:*=hostile"}, flags...)})
	c := l.Client(lab.ClientOptions{Extra: []string{"--confine", "off"}})
	return s, func(what string) error {
		d, err := c.Map(strings.ReplaceAll(what, "/", "|"), s)
		if err == nil {
			err = c.Unmap(d.Name, true)
		}
		return err
	}
}

// confined is what show says of a plugin.
func confined(t *testing.T, s *lab.Server, name string) string {
	t.Helper()
	p, err := s.Plugin(name)
	if err != nil {
		t.Fatal(err)
	}
	return p.Confined
}

// mayTrace reports whether processes of this user may trace those that are not their
// children.
func mayTrace(t *testing.T) bool {
	t.Helper()
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		t.Fatal(err)
	}
	scope, _ := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	return data[0].Effective&(1<<unix.CAP_SYS_PTRACE) != 0 && strings.TrimSpace(string(scope)) < "3"
}

// A hostile plugin of a server that runs with its defaults: each attempt is refused
// if the measure against it holds, and succeeds without confinement.
func TestHostilePluginOfAServer(t *testing.T) {
	l := lab.New(t)
	own := l.Image("disk.img", 1<<20)
	other := t.TempDir()
	tenant := filepath.Join(other, "disk.img")
	if err := os.WriteFile(tenant, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	s, try := hostileServer(t, l, own)
	free, tryFree := hostileServer(t, l, own, "--confine", "off")
	holds, off := confined(t, s, "hostile"), confined(t, free, "hostile")
	t.Logf("holds: %s", holds)
	if off != "off" {
		t.Errorf("without confinement show says %q", off)
	}
	held, _, _ := strings.Cut(holds, ";")
	for what, c := range map[string]struct {
		measure string
		works   bool // without confinement, for whoever runs the test
	}{
		"read:/etc/shadow":                {"landlock", os.Geteuid() == 0},
		"read:/etc/passwd":                {"landlock", true},
		"read:" + tenant:                  {"landlock", true},
		"write:" + tenant:                 {"landlock", true},
		"memory:":                         {"landlock", mayTrace(t)},
		"shell:":                          {"seccomp", true},
		"ptrace:":                         {"seccomp", mayTrace(t)},
		"signal:":                         {"seccomp", true},
		"dial:tcp=" + tcp.Addr().String(): {"seccomp", true},
		"dial:unix=" + free.Socket:        {"seccomp", true},
	} {
		t.Run(what, func(t *testing.T) {
			if c.works {
				if err := tryFree(what); err != nil {
					t.Errorf("without confinement: %v", err)
				}
			}
			if !strings.Contains(held, c.measure) {
				t.Skipf("%s does not hold here: %s", c.measure, holds)
			}
			err := try(what)
			if err == nil || !strings.Contains(err.Error(), "not permitted") && !strings.Contains(err.Error(), "permission denied") {
				t.Errorf("not refused: %v", err)
			}
		})
	}
	for _, what := range []string{"nothing:", "read:" + filepath.Join(own, "disk.img"), "write:" + filepath.Join(own, "disk.img")} {
		if err := try(what); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// --plugin-allow opens what it names, for the plugin that it names.
func TestPluginAllow(t *testing.T) {
	l := lab.New(t)
	own, more := l.Image("disk.img", 1<<20), t.TempDir()
	file := filepath.Join(more, "f")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	s, try := hostileServer(t, l, own, "--plugin-allow", "hostile="+more, "--plugin-allow", "hostile=network")
	for _, what := range []string{"read:" + file, "write:" + file, "dial:tcp=" + tcp.Addr().String()} {
		if err := try(what); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	if holds := confined(t, s, "hostile"); strings.Contains(holds, "network") || !strings.Contains(holds, "no_new_privs") {
		t.Errorf("show: %s", holds)
	}
	if strings.Contains(confined(t, s, "fileio"), "landlock") {
		if err := try("read:/etc/passwd"); err == nil {
			t.Error("a path that is not allowed was read")
		}
	}
}

// A front end of sockets that is told not to show disks is confined like others.
func TestFrontEndWithoutDisks(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--plugin-allow", "nbd=none", "--nbd-listen", "tcp:127.0.0.1:0"}})
	p, err := c.Plugin("nbd")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(confined(t, s, "fileio"), "landlock") != strings.Contains(p.Confined, "landlock") {
		t.Errorf("show: %s", p.Confined)
	}
	d := l.Map(c, "disk.img", s)
	for _, uri := range []string{c.URI(d.Name), "nbd://" + tcpOf(t, c) + "/" + d.Name} {
		run(t, "qemu-io", "-f", "raw", "-c", "write -P 7 4k 64k", "-c", "flush", "-c", "read -P 7 4k 64k", uri)
	}
	if err := c.KillPlugin("nbd"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the next process serves", func() bool {
		return exec.Command("qemu-io", "-f", "raw", "-c", "read -P 7 4k 64k", c.URI(d.Name)).Run() == nil
	})
}

// Plugins of each mode serve a device, and the kernel says what the mode says.
func TestConfineModes(t *testing.T) {
	for _, mode := range []string{"try", "strict", "off"} {
		t.Run(mode, func(t *testing.T) {
			l := lab.New(t)
			server := lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}, Extra: []string{"--confine", mode}}
			s, err := l.StartServer(server)
			if err != nil {
				if mode != "strict" {
					t.Fatal(err)
				}
				t.Skipf("this host does not have all measures: %v", err)
			}
			c := l.Client(lab.ClientOptions{Extra: []string{"--confine", mode}})
			d := l.Map(c, "disk.img", s)
			run(t, "qemu-io", "-f", "raw", "-c", "write -P 7 4k 64k", "-c", "flush", "-c", "read -P 7 4k 64k", c.URI(d.Name))
			io, err := s.Plugin("fileio")
			if err != nil {
				t.Fatal(err)
			}
			front, err := c.Plugin("nbd")
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range []*controlpb.Plugin{io, front} {
				status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Pid))
				if err != nil {
					t.Fatal(err)
				}
				for measure, line := range map[string]string{"no_new_privs": "NoNewPrivs:\t1", "seccomp": "Seccomp:\t2"} {
					held, _, _ := strings.Cut(p.Confined, "; without")
					if says, is := strings.Contains(held, measure), strings.Contains(string(status), line); says != is {
						t.Errorf("%s: show says %q, the kernel %s: %v", p.Name, p.Confined, measure, is)
					}
				}
				if (mode == "off") != (p.Confined == "off") {
					t.Errorf("%s: %q", p.Name, p.Confined)
				}
				if mode == "strict" && strings.Contains(p.Confined, "without") {
					t.Errorf("strict: %s runs, %q", p.Name, p.Confined)
				}
			}
			if out := run(t, filepath.Join(l.Bin, "rnbd"), "server", "show", "--socket", s.Socket, "json"); !strings.Contains(out, io.Confined) {
				t.Errorf("%q is not in: %s", io.Confined, out)
			}
		})
	}
}

// Strict starts nothing on a host that lacks something, and says what.
func TestStrictWithoutSomething(t *testing.T) {
	needRoot(t, "to make the host lack the right to make a namespace")
	lab.Tool(t, "setpriv")
	l := lab.New(t)
	o := lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"},
		Prefix: []string{"setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"}}
	s := l.Server(o)
	if holds := confined(t, s, "fileio"); !strings.Contains(holds, "without network (operation not permitted)") {
		t.Errorf("try: %q", holds)
	}
	o.Extra = []string{"--confine", "strict"}
	_, err := l.StartServer(o)
	if err == nil || !strings.Contains(err.Error(), "does not provide") || !strings.Contains(err.Error(), "network") {
		t.Errorf("strict: %v", err)
	}
}

// --plugin-user is a user whose rights to files count.
func TestPluginUser(t *testing.T) {
	needRoot(t, "to run a plugin as another user")
	l := lab.New(t)
	dir, err := os.MkdirTemp("", "e2e-user-") // reachable for everybody
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, uid := range map[string]int{"nobodys.img": 65534, "roots.img": 0} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(path, uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Extra: []string{"--plugin-user", "nobody"}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--plugin-user", "nobody"}})
	for p, find := range map[string]func(string) (*controlpb.Plugin, error){"fileio": s.Plugin, "nbd": c.Plugin} {
		plugin, err := find(p)
		if err != nil {
			t.Fatal(err)
		}
		st, err := os.Stat(fmt.Sprintf("/proc/%d", plugin.Pid))
		if err != nil {
			t.Fatal(err)
		}
		if uid := st.Sys().(*syscall.Stat_t).Uid; uid != 65534 || !strings.Contains(plugin.Confined, "user") {
			t.Errorf("%s runs as %d, %q", p, uid, plugin.Confined)
		}
	}
	if _, err := c.Map("roots.img", s); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a file that the user may not open: %v", err)
	}
	d := l.Map(c, "nobodys.img", s)
	run(t, "qemu-io", "-f", "raw", "-c", "write -P 7 4k 64k", "-c", "flush", "-c", "read -P 7 4k 64k", c.URI(d.Name))
	if err := s.KillPlugin("fileio"); err != nil {
		t.Fatal(err)
	}
	run(t, "qemu-io", "-f", "raw", "-c", "read -P 7 4k 64k", "-c", "write -P 8 0 4k", c.URI(d.Name))
}

// Root does not execute a plugin that others can change.
func TestPluginFolderOfOthers(t *testing.T) {
	needRoot(t, "others are trusted otherwise")
	l := lab.New(t)
	dir := t.TempDir()
	copyFiles(t, l.Bin, dir)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(filepath.Join(l.Bin, "rnbd"), "server", "run", "--socket", filepath.Join(l.Dir, "s"), "--plugin-dir", dir, "--listen", "127.0.0.1:0").CombinedOutput()
	if err == nil || !strings.Contains(string(out), dir+" can be changed by others") || !strings.Contains(string(out), "chmod go-w") {
		t.Errorf("%v: %s", err, out)
	}
}
