package plugin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// attempts are what a hostile plugin tries. Its host passes the argument.
var attempts = map[string]func(arg string, file *os.File) error{
	"read": func(path string, _ *os.File) error { _, err := os.ReadFile(path); return err },
	"write": func(path string, _ *os.File) error {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err == nil {
			f.Close()
		}
		return err
	},
	"create": func(path string, _ *os.File) error { return os.WriteFile(path, nil, 0o600) },
	"remove": func(path string, _ *os.File) error { return os.Remove(path) },
	"reopen": func(_ string, file *os.File) error {
		f, err := reopen(file, os.O_RDWR)
		if err == nil {
			f.Close()
		}
		return err
	},
	"temporary file": func(string, *os.File) error {
		f, err := os.CreateTemp("", "x")
		if err == nil {
			f.Close()
		}
		return err
	},
	"process_vm_readv": func(string, *os.File) error { return readMemory(os.Getppid()) },
	"ptrace":           func(string, *os.File) error { return unix.PtraceAttach(os.Getppid()) },
	"signal":           func(string, *os.File) error { return syscall.Kill(os.Getppid(), 0) },
	"shell":            func(string, *os.File) error { return exec.Command("/bin/sh", "-c", "true").Run() },
	"execve":           func(string, *os.File) error { return syscall.Exec("/proc/self/exe", []string{"x"}, nil) },
	"execveat": func(string, *os.File) error {
		p, _ := syscall.BytePtrFromString("/proc/self/exe")
		_, _, errno := syscall.Syscall6(unix.SYS_EXECVEAT, ^uintptr(99), uintptr(pointer(p)), 0, 0, 0, 0)
		return errno
	},
	"tcp":         func(addr string, _ *os.File) error { _, err := net.Dial("tcp", addr); return err },
	"udp":         func(addr string, _ *os.File) error { _, err := net.Dial("udp", addr); return err },
	"unix socket": func(path string, _ *os.File) error { _, err := net.Dial("unix", path); return err },
	"limits of its host": func(string, *os.File) error {
		return unix.Prlimit(os.Getppid(), unix.RLIMIT_NOFILE, nil, &unix.Rlimit{})
	},
	"datagram": func(path string, _ *os.File) error { _, err := net.Dial("unixgram", path); return err },
	"mount":    func(dir string, _ *os.File) error { return unix.Mount("x", dir, "tmpfs", 0, "") },
	"user":     func(string, *os.File) error { return unix.Unshare(unix.CLONE_NEWUSER) },
	"kernel":   func(string, *os.File) error { _, err := unix.KeyctlInt(0, 0, 0, 0, 0); return err },
	"io_uring": func(string, *os.File) error { return uring.Supported() },
}

// did is the answer to an attempt that succeeded.
const did = "it could"

func attempt(arg string, file *os.File) error {
	what, arg, _ := strings.Cut(arg, ":")
	if err := attempts[what](arg, file); err != nil {
		return err
	}
	return errors.New(did)
}

// hostile starts a plugin that may open the files below root.
func hostile(t *testing.T, root string) (*Process, Config) {
	t.Helper()
	c := confinedSelf(t, &confine.Config{Mode: confine.Try}, root)
	return launchT(t, c), c
}

func confinedSelf(t *testing.T, cc *confine.Config, root string) Config {
	t.Helper()
	c := self(t, "memory")
	p, err := cc.Storage("memory", root, false)
	if err != nil {
		t.Fatal(err)
	}
	c.Confine, c.Launcher = p, []string{c.Path, confine.Argument}
	return c
}

// needs skips unless a measure holds, and names the measure.
func needs(t *testing.T, r *confine.Report, name string) {
	t.Helper()
	for _, m := range r.Measures {
		if m.Name == name {
			if !m.Holds {
				t.Skipf("%s does not hold here: %s", name, m.Text)
			}
			return
		}
	}
	t.Fatalf("the report has no measure %q: %v", name, r)
}

func TestHostilePlugin(t *testing.T) {
	root, other := t.TempDir(), t.TempDir()
	image, tenant := filepath.Join(root, "image"), filepath.Join(other, "image")
	for _, f := range []string{image, tenant} {
		if err := os.WriteFile(f, make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	sock := filepath.Join(other, "s")
	local, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	defer local.Close()
	dgram := filepath.Join(other, "d")
	log, err := net.ListenPacket("unixgram", dgram)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	p, plain := hostile(t, root)
	plain.Confine = nil
	free := launchT(t, plain)
	host := os.Getpid()
	try := func(p *Process, what string) error {
		f, err := os.OpenFile(image, unix.O_PATH, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if strings.HasSuffix(what, "another's image") {
			f.Close()
			if f, err = os.OpenFile(tenant, unix.O_PATH, 0); err != nil {
				t.Fatal(err)
			}
		}
		_, err = p.OpenDisk(testContext(t), OpenRequest{Device: 9, Name: "try:" + what, File: f})
		return err
	}
	for _, c := range []struct{ what, measure string }{
		{"read:/etc/shadow", "landlock"},
		{"read:/etc/passwd", "landlock"},
		{"read:" + tenant, "landlock"},
		{"write:" + tenant, "landlock"},
		{"reopen:another's image", "landlock"},
		{"create:" + filepath.Join(root, "new"), "landlock"},
		{"remove:" + tenant, "landlock"},
		{fmt.Sprintf("read:/proc/%d/environ", host), "landlock"},
		{fmt.Sprintf("write:/proc/%d/mem", host), "landlock"},
		{"process_vm_readv:", "seccomp"},
		{"ptrace:", "seccomp"},
		{"signal:", "seccomp"},
		{"limits of its host:", "seccomp"},
		{"datagram:" + dgram, "seccomp"},
		{"shell:", "seccomp"},
		{"execve:", "seccomp"},
		{"execveat:", "seccomp"},
		{"tcp:" + tcp.Addr().String(), "seccomp"},
		{"udp:127.0.0.1:9", "seccomp"},
		{"unix socket:" + sock, "seccomp"},
		{"mount:" + root, "seccomp"},
		{"user:", "seccomp"},
		{"kernel:", "seccomp"},
	} {
		t.Run(c.what, func(t *testing.T) {
			needs(t, p.Confined(), c.measure)
			if err := try(p, c.what); !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) {
				t.Errorf("not refused: %v", err)
			}
		})
	}
	// What it is for works, and the attempts are real: without limits they succeed.
	works := []string{"reopen:", "read:" + image, "write:" + image, "temporary file:"}
	if uring.Supported() == nil {
		works = append(works, "io_uring:")
	}
	for _, what := range works {
		if err := try(p, what); err == nil || !strings.Contains(err.Error(), did) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, what := range []string{"read:/etc/passwd", "write:" + tenant, "reopen:another's image", "shell:", "tcp:" + tcp.Addr().String(),
		"unix socket:" + sock, "datagram:" + dgram, "limits of its host:"} {
		if err := try(free, what); err == nil || !strings.Contains(err.Error(), did) {
			t.Errorf("without limits %s: %v", what, err)
		}
	}
}

// What the report says is what the kernel says of the process.
func TestConfinementIsWhatTheKernelSays(t *testing.T) {
	p, _ := hostile(t, t.TempDir())
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	status := map[string]string{}
	for _, line := range strings.Split(string(b), "\n") {
		k, v, _ := strings.Cut(line, ":")
		status[k] = strings.TrimSpace(v)
	}
	for _, m := range p.Confined().Measures {
		switch {
		case !m.Holds:
			t.Logf("%s does not hold here: %s", m.Name, m.Text)
		case m.Name == "no_new_privs" && status["NoNewPrivs"] != "1",
			m.Name == "seccomp" && status["Seccomp"] != "2",
			m.Name == "capabilities" && os.Geteuid() == 0 && status["CapPrm"] != "0000000000804002",
			m.Name == "capabilities" && os.Geteuid() != 0 && status["CapPrm"] != "0000000000000000":
			t.Errorf("%s is reported to hold: %v", m.Name, status)
		}
	}
	own, _ := os.Readlink("/proc/self/ns/net")
	its, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", p.PID()))
	for _, m := range p.Confined().Measures {
		if m.Name == "network" && m.Holds == (own == its) {
			t.Errorf("network: holds %v, namespaces %s and %s", m.Holds, own, its)
		}
	}
}

func TestPluginUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it changes the user")
	}
	root := t.TempDir()
	for dir := root; dir != "/tmp" && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	c := confinedSelf(t, &confine.Config{Mode: confine.Try, User: "nobody"}, root)
	p := launchT(t, c)
	st, err := os.Stat(fmt.Sprintf("/proc/%d", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	if uid := st.Sys().(*syscall.Stat_t).Uid; uid != c.Confine.User.UID {
		t.Errorf("it runs as %d", uid)
	}
	secret := filepath.Join(root, "secret")
	if err := os.WriteFile(secret, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = p.OpenDisk(testContext(t), OpenRequest{Name: "try:read:" + secret})
	if !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a file of root's: %v", err)
	}
	if err := p.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
}

// Strict says what is missing, and starts nothing.
func TestStrict(t *testing.T) {
	c := confinedSelf(t, &confine.Config{Mode: confine.Strict}, filepath.Join(t.TempDir(), "absent"))
	_, err := Launch(testContext(t), c)
	if err == nil || !strings.Contains(err.Error(), "does not provide paths") || !strings.Contains(err.Error(), "absent") {
		t.Errorf("a search path that is not there: %v", err)
	}
	p, _ := hostile(t, t.TempDir())
	c = confinedSelf(t, &confine.Config{Mode: confine.Strict}, t.TempDir())
	strict, err := Launch(testContext(t), c)
	if missing := p.Confined().Missing(); len(missing) > 0 {
		if err == nil || !strings.Contains(err.Error(), missing[0]) {
			t.Errorf("missing %v: %v", missing, err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := strict.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
}

// On a kernel without a measure try goes on and says so, strict does not start, off
// asks for nothing.
func TestKernelsThatLackSomething(t *testing.T) {
	p, _ := hostile(t, t.TempDir())
	here := map[string]bool{} // measures that hold on this host
	for _, m := range p.Confined().Measures {
		here[m.Name] = m.Holds
	}
	for _, c := range []struct{ lacks, measure, says string }{
		{"landlock", "landlock", "the kernel has no landlock"},
		{"landlock at boot", "landlock", "not enabled at boot (lsm=)"},
		{"landlock's domain", "landlock", "enter the domain"},
		{"seccomp", "seccomp", "not supported by the kernel"},
		{"namespaces", "network", "operation not permitted"},
		{"landlock,seccomp,namespaces", "seccomp", "not supported by the kernel"},
	} {
		t.Run(c.lacks, func(t *testing.T) {
			t.Parallel()
			start := func(mode confine.Mode) (*Process, error) {
				conf := confinedSelf(t, &confine.Config{Mode: mode}, t.TempDir())
				conf.Launcher = []string{conf.Path, lacking, c.lacks}
				p, err := Launch(testContext(t), conf)
				if err == nil {
					t.Cleanup(func() { p.Kill(); <-p.cleaned })
				}
				return p, err
			}
			p, err := start(confine.Try)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range p.Confined().Measures {
				lost := m.Name == c.measure || strings.Contains(c.lacks, m.Name) || m.Name == "network" && strings.Contains(c.lacks, "namespaces")
				if m.Holds != (here[m.Name] && !lost) {
					t.Errorf("try: %s holds %v (%s)", m.Name, m.Holds, m.Text)
				}
				if m.Name == c.measure && !strings.Contains(m.Text, c.says) {
					t.Errorf("try: %s: %s", m.Name, m.Text)
				}
			}
			if _, err := p.OpenDisk(testContext(t), OpenRequest{Device: 1, Name: "x"}); err != nil {
				t.Errorf("try: %v", err)
			}
			_, err = start(confine.Strict)
			if err == nil || !strings.Contains(err.Error(), c.measure) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "--confine=try") {
				t.Errorf("strict: %v", err)
			}
		})
	}
}

func TestOffTakesNothing(t *testing.T) {
	c := confinedSelf(t, &confine.Config{Mode: confine.Off}, t.TempDir())
	p := launchT(t, c)
	if p.Confined() != nil || p.Confined().String() != "off" {
		t.Errorf("%v", p.Confined())
	}
}

// A launcher that cannot be executed, or says nothing, is an error with a reason.
func TestLaunchersThatFail(t *testing.T) {
	for _, c := range []struct {
		name     string
		launcher []string
		says     string
	}{
		{"absent", []string{filepath.Join(t.TempDir(), "absent")}, "no such file"},
		{"none", nil, "needs a launcher"},
		{"another program", []string{"/bin/true"}, "the launcher reported nothing"},
	} {
		conf := confinedSelf(t, &confine.Config{Mode: confine.Try}, t.TempDir())
		conf.Launcher = c.launcher
		before := descriptors(t)
		_, err := Launch(testContext(t), conf)
		if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), conf.Path) {
			t.Errorf("%s: %v", c.name, err)
		}
		sdktest.Eventually(t, "no descriptor is left", func() bool { return descriptors(t) <= before })
	}
}

// descriptors is how many this process has.
func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// The plugin has its own control socket and the standard descriptors, and none of
// its host's or launcher's.
func TestDescriptorsOfAConfinedPlugin(t *testing.T) {
	p, _ := hostile(t, t.TempDir())
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.PID()))
	if err != nil {
		t.Skip(err)
	}
	for _, fd := range fds {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", p.PID(), fd.Name()))
		if err != nil {
			continue // closed meanwhile
		}
		own := to == "/dev/null" || strings.HasPrefix(to, "socket:") || strings.HasPrefix(to, "pipe:") ||
			strings.HasPrefix(to, "anon_inode:") || strings.HasPrefix(to, "/sys/fs/cgroup/")
		if !own {
			t.Errorf("descriptor %s is %s", fd.Name(), to)
		}
	}
	if len(fds) > 16 {
		t.Errorf("%d descriptors", len(fds))
	}
}

// The launcher executes the file that was hashed, not the one that has its name by
// then.
func TestPinnedFileIsExecuted(t *testing.T) {
	c := confinedSelf(t, &confine.Config{Mode: confine.Try}, t.TempDir())
	exe, err := os.ReadFile(c.Path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(exe)
	c.Path, c.SHA256 = filepath.Join(t.TempDir(), "p"), sum[:]
	if err := os.WriteFile(c.Path, exe, 0o700); err != nil {
		t.Fatal(err)
	}
	// The launcher waits until the name leads to another file.
	swap := filepath.Join(filepath.Dir(c.Path), "launcher")
	script := fmt.Sprintf("#!/bin/sh\nmv %[1]s %[1]s.old; echo '#!/bin/sh' >%[1]s; chmod 700 %[1]s\nexec %[2]s %[3]s\n", c.Path, c.Launcher[0], confine.Argument)
	if err := os.WriteFile(swap, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	c.Launcher = []string{swap}
	p := launchT(t, c)
	real, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", p.PID()))
	if err != nil || real != c.Path+".old" {
		t.Errorf("it executes %s, %v", real, err)
	}
}

// A launcher without a profile says what it is.
func TestLauncherByHand(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(context.Background(), exe, confine.Argument).CombinedOutput()
	if err == nil || !bytes.Contains(out, []byte("not for users")) {
		t.Errorf("%v: %s", err, out)
	}
}
