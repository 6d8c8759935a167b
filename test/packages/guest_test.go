package packages

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// plan has the steps of each boot, functions of testdata/proof.sh.
func plan() []string {
	if !long {
		return []string{
			"up units hardening reload activation clock write dead reboot",
			"up refused poweroff",
		}
	}
	return []string{
		"up units hardening reload write reboot",
		"up activation clock write reboot",
		"up hang write reboot",
		"up kills crashes write reboot",
		"up upgrade write dead reboot",
		"up refused purge poweroff",
	}
}

// Limits of the test for an emulated machine with other work beside it. On a
// quiet one a boot takes half a minute.
const (
	bootLimit = 30 * time.Minute
	stepLimit = 25 * time.Minute
)

// downBound is the time, by the guest's clock, from the order to boot to the
// kernel's end: 30 s for requests to a server that is gone (loss of client.yaml),
// 90 s for the mounts, 40 s each for client and server. See docs/use/operations.md.
const downBound = 200.0

// A Debian guest boots with the packages installed, mounts a file system from
// fstab over an rnbd disk, and boots again; in the long form five times. Once the
// server is killed before the host goes down.
func TestBootWithThePackages(t *testing.T) {
	vm.Require(t)
	require(t, "mmdebstrap", "nsenter", "mke2fs", "modprobe")
	g := bootGuest(t, guestDisk(t))
	for i, line := range plan() {
		g.boot(i+1, strings.Fields(line))
	}
	for i, line := range plan() {
		if took := g.down(i + 1); took > downBound {
			t.Errorf("boot %d (%s): the host needs %.0f s to go down, at most %.0f are allowed", i+1, line, took, downBound)
		} else {
			t.Logf("boot %d (%s): down within %.1f s", i+1, line, took)
		}
	}
	if lines := vm.Splats(g.kernelLog()); len(lines) > 0 {
		t.Errorf("the guest's kernel: %s", strings.Join(lines, "\n"))
	}
}

// guest is a virtual machine, seen by its serial lines: the kernel's console in
// a file, and what the proof says.
type guest struct {
	t       *testing.T
	dir     string
	said    chan string
	ordered []float64 // by boot: the guest's time of the order to go down
}

func bootGuest(t *testing.T, dir string) *guest {
	t.Helper()
	g := &guest{t: t, dir: dir, said: make(chan string, 1<<12)}
	// With -icount the guest's clock counts its instructions while it computes: a
	// machine with other work beside it makes no time limit of the guest shorter.
	cmd := exec.Command("qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "tcg,thread=single", "-cpu", vm.CPU,
		"-icount", "shift=0", "-m", "1024", "-kernel", filepath.Join(dir, "kernel"), "-initrd", filepath.Join(dir, "initrd"),
		"-append", "console=ttyS0 quiet panic=-1 mitigations=off systemd.firstboot=no watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120",
		"-drive", "if=virtio,format=raw,cache=unsafe,file="+filepath.Join(dir, "disk"),
		"-serial", "file:"+filepath.Join(dir, "console"), "-serial", "stdio")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(g.said)
		for in := bufio.NewScanner(out); in.Scan(); {
			g.said <- strings.TrimRight(in.Text(), "\r")
		}
	}()
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if t.Failed() {
			log := strings.Split(g.kernelLog(), "\n")
			t.Logf("console:\n%s", strings.Join(log[max(0, len(log)-100):], "\n"))
		}
	})
	return g
}

func (g *guest) kernelLog() string {
	b, _ := os.ReadFile(filepath.Join(g.dir, "console"))
	return strings.ReplaceAll(string(b), "\r", "")
}

// next returns what boot n says next.
func (g *guest) next(n int, limit time.Duration) string {
	g.t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			g.t.Fatalf("boot %d says nothing more within %v", n, limit)
		case line, open := <-g.said:
			if !open {
				g.t.Fatalf("boot %d: the guest is off", n)
			}
			if _, text, ok := strings.Cut(line, fmt.Sprintf("PROOF %d ", n)); ok {
				return text
			}
		}
	}
}

// boot follows boot number n to its end.
func (g *guest) boot(n int, steps []string) {
	g.t.Helper()
	if text := g.next(n, bootLimit); text != "begin" {
		g.t.Fatalf("boot %d begins with %q", n, text)
	}
	var done []string
	for {
		text := g.next(n, stepLimit)
		f := strings.Fields(text)
		switch f[0] {
		case "FAILED:":
			g.t.Errorf("boot %d: %s", n, text)
		case "step":
			g.t.Logf("boot %d: %s", n, text)
			done = append(done, f[1])
		case "mounted", "journal:":
			g.t.Logf("boot %d: %s", n, text)
		case "end":
			at, err := strconv.ParseFloat(f[2], 64)
			if done = append(done, f[1]); err != nil || !slices.Equal(done, steps) {
				g.t.Fatalf("boot %d made the steps %q of %q, %v", n, done, steps, err)
			}
			g.ordered = append(g.ordered, at)
			return
		}
	}
}

var ends = regexp.MustCompile(`\[ *([0-9.]+)\] reboot: (?:Restarting system|Power down)`)

// down returns how many seconds boot n needed to go down. Its kernel must have
// ended, but for the last one.
func (g *guest) down(n int) float64 {
	g.t.Helper()
	var all [][]string
	for end := time.Now().Add(bootLimit); len(all) < n; time.Sleep(100 * time.Millisecond) {
		if all = ends.FindAllStringSubmatch(g.kernelLog(), -1); time.Now().After(end) {
			g.t.Fatalf("boot %d does not go down within %v", n, bootLimit)
		}
	}
	at, err := strconv.ParseFloat(all[n-1][1], 64)
	if err != nil {
		g.t.Fatal(err)
	}
	return at - g.ordered[n-1]
}
