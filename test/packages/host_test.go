package packages

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// commandTime bounds a command on a machine with other work to do.
const commandTime = 5 * time.Minute

// host is a clean root with processes, mounts and network of its own.
type host struct {
	t    *testing.T
	init *exec.Cmd
	root string // as its namespace of mounts has it
}

// setUp makes the layer above the clean root, $1, in the folder $2, the root of
// the host. $3 and $4 are packages.
const setUp = `set -e
mount --make-rprivate /
ip link set lo up
mkdir "$2/upper" "$2/work" "$2/root"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
cd "$2/root"
mount -t proc proc proc
mount -t tmpfs tmpfs dev
mount -t tmpfs tmpfs run
mount -t tmpfs tmpfs tmp
for node in null zero full random urandom tty; do touch dev/$node; mount --bind /dev/$node dev/$node; done
mkdir -p dev/shm mnt/first mnt/second
mount --bind "$3" mnt/first
mount --bind "$4" mnt/second
echo ready
exec sleep infinity
`

// newHost starts a host that ends with the test, above a root. It has the packages
// of the first version and of upgrade.
func newHost(t *testing.T, root, upgrade string) *host {
	t.Helper()
	dir, err := os.MkdirTemp(temp, "host-") // a short name, for sockets
	if err != nil {
		t.Fatal(err)
	}
	h := &host{t: t, root: filepath.Join(dir, "root")}
	h.init = startInit(t, setUp, root, dir, packages(t, first), packages(t, upgrade))
	return h
}

// startInit runs a shell script as process 1 of namespaces of its own. When it
// has said that it is ready it stays until the test ends, and all processes and
// mounts there end with it.
func startInit(t *testing.T, script string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-c", script, "sh"}, args...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the namespaces are not set up: %v\n%s", err, log.String())
	}
	return cmd
}

// enter is the beginning of a command line that runs in the namespaces of init.
func enter(init *exec.Cmd) []string {
	return []string{"nsenter", "--target", fmt.Sprint(init.Process.Pid), "--mount", "--pid", "--net", "--"}
}

// path is where the test finds a file of the host.
func (h *host) path(name string) string {
	return filepath.Join("/proc", fmt.Sprint(h.init.Process.Pid), "root", h.root, name)
}

// try runs a shell command in the host.
func (h *host) try(command string) (string, error) {
	return h.outside("chroot", h.root, "/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C", "HOME=/root", "sh", "-c", command)
}

// run is try that fails the test.
func (h *host) run(command string) string {
	h.t.Helper()
	out, err := h.try(command)
	if err != nil {
		h.t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return out
}

// outside runs a program of the test's machine on the host.
func (h *host) outside(argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(h.t.Context(), commandTime)
	defer cancel()
	argv = append(enter(h.init), argv...)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.WaitDelay = 10 * time.Second // for daemons that keep the pipe
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// daemon starts a daemon, with its log in a file.
func (h *host) daemon(name, command string) {
	h.t.Helper()
	h.run("setsid " + command + " >/var/log/" + name + ".log 2>&1 </dev/null & echo $! >/tmp/" + name + ".pid")
	h.t.Cleanup(func() {
		if h.t.Failed() {
			out, _ := os.ReadFile(h.path("/var/log/" + name + ".log"))
			h.t.Logf("log of %s:\n%s", name, out)
		}
	})
}

// stop ends a daemon and waits for its end.
func (h *host) stop(name string) {
	h.t.Helper()
	h.run("kill $(cat /tmp/" + name + ".pid) && while kill -0 $(cat /tmp/" + name + ".pid) 2>/dev/null && ! grep -q '^State:.Z' /proc/$(cat /tmp/" + name + ".pid)/status; do sleep 0.1; done")
}

// book is where package managers and the programs of the test keep books.
var book = []string{"var/lib/dpkg", "var/lib/apt", "var/lib/rpm", "var/cache", "var/log", "proc", "dev", "tmp", "mnt", "srv"}

// files are the paths of the host outside of the books, with what is in them.
func (h *host) files() map[string]string {
	h.t.Helper()
	root := h.path("/")
	out := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(root, path)
		if slices.Contains(book, name) {
			return filepath.SkipDir
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		out[name] = st.Mode().String()
		if st.Mode().IsRegular() {
			out[name] += fmt.Sprint(" ", st.Size(), " bytes")
		}
		return nil
	})
	if err != nil {
		h.t.Fatal(err)
	}
	return out
}

// same fails if the host has other files than before.
func (h *host) same(before map[string]string, after string) {
	h.t.Helper()
	now := h.files()
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if was, ok := before[name]; !ok {
			lines = append(lines, "left: "+name+" "+now[name])
		} else if was != now[name] {
			lines = append(lines, "changed: "+name+" "+was+" "+now[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(before)) {
		if _, ok := now[name]; !ok {
			lines = append(lines, "gone: "+name)
		}
	}
	if len(lines) > 0 {
		h.t.Errorf("after %s:\n%s", after, strings.Join(lines, "\n"))
	}
}
