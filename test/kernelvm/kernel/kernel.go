// Package kernel fetches a Linux kernel of Debian for guests to boot and builds
// the RDMA block modules that Debian leaves out: rtrs, rnbd and siw.
//
// Tests of newer features of the kernel use the one of Debian's backports:
// PrepareNewer.
//
// Everything lands in a cache folder of the repository, by kernel version; the
// host's own kernel and modules are not touched. Processes that prepare the
// same version wait for each other.
package kernel

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"github.com/rnbd-go/rnbd/test/lab"
)

// series of the kernel that is fetched.
const series = "6.12"

// recipe changes when the contents of the cache do, so that old ones are left.
const recipe = "1"

// Kernel is the set of files for a guest.
type Kernel struct {
	Release string // as in uname -r
	Image   string // to boot
	Modules string // a folder lib/modules/Release; unless newer, with rtrs, rnbd and siw in "extra"
}

var prepared = sync.OnceValues(prepare)

// Prepare returns the kernel, fetching and building it if the cache has none.
// It needs apt-get and a network then, and takes about a minute and a half.
func Prepare() (Kernel, error) { return prepared() }

// withCache runs f with the cache folder and the tools there, alone.
func withCache[T any](f func(cache string) (T, error)) (none T, err error) {
	cache := filepath.Join(lab.Root(), ".cache", "kernelvm")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return none, err
	}
	unlock, err := lock(filepath.Join(cache, "lock"))
	if err != nil {
		return none, err
	}
	defer unlock()
	if err := installTools(); err != nil {
		return none, err
	}
	return f(cache)
}

func prepare() (Kernel, error) { return withCache(prepareIn) }

func prepareIn(cache string) (Kernel, error) {
	if dir, release, err := cached(cache, "-r"+recipe); err == nil {
		return at(dir, release), nil
	}
	var p pkgs
	var b builder
	err := withIndex(func() (err error) {
		if p, err = packages(); err != nil {
			return err
		}
		dir := filepath.Join(cache, p.release+"-r"+recipe)
		b = builder{dir: dir, release: p.release, root: filepath.Join(dir, "root")}
		return b.fetch(append(p.names, p.source)...)
	})
	if err != nil {
		return Kernel{}, err
	}
	if err := b.run(p); err != nil {
		return Kernel{}, fmt.Errorf("kernel %s: %w", p.release, err)
	}
	return at(b.dir, p.release), complete(b.dir, p.release)
}

// complete marks dir as a kernel that may be used.
func complete(dir, release string) error {
	return os.WriteFile(filepath.Join(dir, "complete"), []byte(release), 0o644)
}

// cached finds the newest complete kernel of the cache, by the end of its
// folder's name.
func cached(cache, suffix string) (dir, release string, err error) {
	stamps, _ := filepath.Glob(filepath.Join(cache, "*"+suffix, "complete"))
	if len(stamps) == 0 {
		return "", "", errors.New("the cache is empty")
	}
	stamp := stamps[len(stamps)-1]
	b, err := os.ReadFile(stamp)
	return filepath.Dir(stamp), string(b), err
}

func at(dir, release string) Kernel {
	return Kernel{
		Release: release,
		Image:   filepath.Join(dir, "root", "boot", "vmlinuz-"+release),
		Modules: filepath.Join(dir, "root", "lib", "modules"),
	}
}

func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() { f.Close() }, nil
}

// tools are programs that the lab and its scenarios run, and files that they
// need, with their packages.
var tools = map[string]string{
	"qemu-system-x86_64": "qemu-system-x86", "ip": "iproute2", "rdma": "iproute2", "modprobe": "kmod", "xz": "xz-utils",
	"make": "make", "gcc": "gcc", "mke2fs": "e2fsprogs", "mkfs.xfs": "xfsprogs", "fio": "fio", "tcpdump": "tcpdump", "tshark": "tshark", "wg": "wireguard-tools",
	"dmsetup": "dmsetup", "mdadm": "mdadm", "sfdisk": "fdisk",
	// for tests that are built for the guest
	"/usr/include/stdio.h": "libc6-dev", "/usr/include/infiniband/verbs.h": "libibverbs-dev", "/usr/include/rdma/rdma_cma.h": "librdmacm-dev",
}

// installTools installs missing tools, when this is root's machine.
func installTools() error {
	var missing []string
	for tool, pkg := range tools {
		if !found(tool) {
			missing = append(missing, pkg)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	if os.Getuid() != 0 {
		return fmt.Errorf("not installed: %s", strings.Join(missing, " "))
	}
	if err := update(); err != nil {
		return err
	}
	return command("", "apt-get", append([]string{"install", "-y", "-qq", "-o", "DPkg::Lock::Timeout=600", "--no-install-recommends"}, missing...)...)
}

func found(tool string) bool {
	if _, err := exec.LookPath(tool); err == nil {
		return true
	}
	path := tool
	if !filepath.IsAbs(path) {
		path = "/usr/sbin/" + tool
	}
	_, err := os.Stat(path)
	return err == nil
}

// command runs a program; the error carries the end of its output.
func command(dir, name string, args ...string) error {
	_, err := run(dir, name, args...)
	return err
}

// output returns the output of a program.
func output(name string, args ...string) (string, error) { return run("", name, args...) }

func run(dir, name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive", "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out[max(0, len(out)-4000):])
	}
	return string(out), nil
}
