package packages

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// podman keeps its images and containers below a folder, and runs in namespaces
// of its own, since some environments have groups of processes (cgroups) in a
// form that it does not take.
type podman struct {
	t    *testing.T
	dir  string
	init *exec.Cmd
}

const podmanInit = `set -e
mount --make-rprivate /
ip link set lo up
mount -t proc proc /proc
umount -R /sys/fs/cgroup
mount -t cgroup2 cgroup /sys/fs/cgroup || mount -t tmpfs cgroup /sys/fs/cgroup
echo ready
exec sleep infinity
`

func (p podman) run(args ...string) string {
	p.t.Helper()
	out, err := p.try(args...)
	if err != nil {
		p.t.Fatalf("podman %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return out
}

func (p podman) try(args ...string) (string, error) {
	common := append(enter(p.init), "podman", "--root", filepath.Join(p.dir, "root"), "--runroot", filepath.Join(p.dir, "run"), "--tmpdir", filepath.Join(p.dir, "tmp"),
		"--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "none")
	cmd := exec.Command(common[0], append(common[1:], args...)...)
	cmd.WaitDelay = 10 * time.Second // for containers that keep the pipe
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// The image has a server, a client and its commands: a server and a client in two
// containers exchange data.
func TestImageRunsInPodman(t *testing.T) {
	require(t)
	if !long {
		t.Skip("long form")
	}
	if _, err := exec.LookPath("podman"); err != nil {
		t.Skip("podman is not installed")
	}
	dir, err := os.MkdirTemp("", "podman") // podman takes short names only
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	p := podman{t: t, dir: dir, init: startInit(t, podmanInit)}
	loaded := p.run("load", "-q", "-i", filepath.Join(packages(t, first), "rnbd_"+first+"_amd64.oci.tar"))
	_, image, _ := strings.Cut(strings.TrimSpace(loaded), "Loaded image: ")
	if !strings.HasSuffix(image, "rnbd:"+first) {
		t.Fatalf("podman loads %q", loaded)
	}
	if out := p.run(container(t, "--rm", "--network=none", image, "version")...); !strings.Contains(out, "rnbd "+first+"\n") {
		t.Errorf("rnbd version in a container says %q", out)
	}

	exports, sockets := filepath.Join(dir, "srv"), filepath.Join(dir, "sock")
	for _, d := range []string{exports, sockets} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(exports, "disk.img"), make([]byte, 16<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	const address = "127.0.0.1:1234"
	p.start("server", "-v", exports+":/srv/rnbd", image, "server", "run", "--search-path", "/srv/rnbd", "--listen", address)
	p.start("client", "-v", sockets+":/run/rnbd", image, "client", "run", "--frontend", "nbd-socket")
	p.eventually("exec", "client", "rnbd", "discover", address)
	p.eventually("exec", "client", "rnbd", "map", "disk.img", "from", address)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := nbdclient.Dial(ctx, "unix", filepath.Join(sockets, "nbd.sock"), nbdclient.Options{Export: "rnbd0"})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	data := bytes.Repeat([]byte("through two containers. "), 512)[:4096]
	if _, err := c.WriteAt(data, 8192); err != nil {
		t.Fatal(err)
	}
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile(filepath.Join(exports, "disk.img"))
	if err != nil || !bytes.Equal(file[8192:8192+4096], data) {
		t.Errorf("the server's file has other contents: %v", err)
	}
}

// container is a command of podman. The limits are those of the test, since podman
// asks for more than it may have in some environments.
func container(t *testing.T, args ...string) []string {
	t.Helper()
	run := []string{"run", "--cgroups=disabled"}
	for name, number := range map[string]int{"nofile": syscall.RLIMIT_NOFILE, "nproc": 6} {
		var l syscall.Rlimit
		if err := syscall.Getrlimit(number, &l); err != nil {
			t.Fatal(err)
		}
		run = append(run, fmt.Sprintf("--ulimit=%s=%d:%d", name, min(l.Cur, 1<<20), min(l.Max, 1<<20)))
	}
	return append(run, args...)
}

// start runs a container on the test's network until the end of the test.
func (p podman) start(name string, args ...string) {
	p.t.Helper()
	p.run(container(p.t, append([]string{"-d", "--name", name, "--network=host"}, args...)...)...)
	p.t.Cleanup(func() {
		if p.t.Failed() {
			log, _ := p.try("logs", name)
			p.t.Logf("log of %s:\n%s", name, log)
		}
		p.try("rm", "-f", "-t", "30", name)
	})
}

// eventually runs a command until it works.
func (p podman) eventually(args ...string) {
	p.t.Helper()
	var out string
	var err error
	for end := time.Now().Add(2 * time.Minute); time.Now().Before(end); time.Sleep(500 * time.Millisecond) {
		if out, err = p.try(args...); err == nil {
			return
		}
	}
	p.t.Fatalf("podman %s: %v\n%s", strings.Join(args, " "), err, out)
}

func TestLintianFindsNoErrors(t *testing.T) {
	require(t)
	if !long {
		t.Skip("long form")
	}
	if _, err := exec.LookPath("lintian"); err != nil {
		t.Skip("lintian is not installed")
	}
	debs, err := filepath.Glob(filepath.Join(packages(t, first), "*.deb"))
	if err != nil || len(debs) != 6 {
		t.Fatalf("packages %q, %v", debs, err)
	}
	out, err := exec.Command("lintian", append([]string{"--allow-root", "--fail-on", "error", "--tag-display-limit", "0"}, debs...)...).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}
