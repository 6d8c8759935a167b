package vm

import (
	"encoding/gob"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/kernel"
	"github.com/rnbd-go/rnbd/test/kernelvm/vm/wire"
)

// Enabled reports whether tests with guests are asked for: they need root, a
// network for packages, and minutes. `make test-kernel` sets RNBD_KERNEL=1.
func Enabled() bool { return os.Getenv("RNBD_KERNEL") != "" }

// Require skips the test unless tests with guests are asked for.
func Require(t testing.TB) {
	t.Helper()
	if !Enabled() {
		t.Skip("boots a virtual machine: make test-kernel, or RNBD_KERNEL=1")
	}
}

// bootLimit is for a machine with other work to do.
const bootLimit = 3 * time.Minute

// Config is the configuration of a guest.
type Config struct {
	CPUs    int // default 2
	MemMiB  int // default 1536; half of it is for files that the guest writes
	Net     Net
	Modules []string // loaded after the start, by modprobe
	Cmdline string   // added to the kernel's command line
	// Parallel has an emulating thread for each processor, for figures that
	// need processors at work at the same time. With it QEMU 7.2 keeps
	// translations of code that another processor is patching, and the guest
	// may die of an int3 that was there for a moment.
	Parallel bool
	// Newer asks for the kernel of Debian's backports instead of the usual
	// one. It has no rtrs, rnbd and siw.
	Newer bool
}

// Boot starts a guest that ends with the test. The test is skipped where tests
// with guests are not asked for.
func Boot(t testing.TB, c Config) *Guest {
	t.Helper()
	Require(t)
	g, err := Start(c)
	if err != nil {
		t.Fatalf("boot: %v", err)
	}
	t.Cleanup(g.Stop)
	g.Watch(t)
	return g
}

// bootAttempts: before anything of a test runs, a guest that does not come up
// says nothing about the code under test.
const bootAttempts = 5

// Start starts a guest, for tests that share one. The caller stops it.
func Start(c Config) (g *Guest, err error) {
	for range bootAttempts {
		if g, err = boot(c); !errors.Is(err, errNoAgent) && !errors.Is(err, errCrashed) {
			break
		}
	}
	return g, err
}

func boot(c Config) (*Guest, error) {
	if c.CPUs == 0 {
		c.CPUs = 2
	}
	if c.MemMiB == 0 {
		c.MemMiB = 1536
	}
	prepare := kernel.Prepare
	if c.Newer {
		prepare = kernel.PrepareNewer
	}
	k, err := prepare()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "rnbd-vm-")
	if err != nil {
		return nil, err
	}
	g := &Guest{Kernel: k, dir: dir, calls: map[uint32]*call{}, gone: make(chan struct{})}
	if err := g.start(c); err != nil {
		err = fmt.Errorf("%w\n%s", err, tail(g.KernelLog(), 30))
		if g.crashed() {
			err = fmt.Errorf("%w: %w", errCrashed, err)
		}
		g.Stop()
		return nil, err
	}
	return g, nil
}

// CPU is the model of the emulated CPUs, without CMPXCHG16B. With it the guest's
// kernel died of a double fault now and then, in its memory allocator: behind that
// instruction the flags were part of an address (QEMU 7.2.22).
const CPU = "max,-cx16"

func (g *Guest) start(c Config) error {
	tree := wire.Config{Tree: g.Kernel.Modules}
	if err := buildRamDisk(filepath.Join(g.dir, "initrd"), g.Kernel, tree, "9p", "9pnet_virtio", "overlay", "virtio_net"); err != nil {
		return fmt.Errorf("initial ram disk: %w", err)
	}
	netArgs, err := c.Net.setUp(g)
	if err != nil {
		return fmt.Errorf("network: %w", err)
	}
	// Watchdogs measure the host's load here, not the guest's health.
	cmdline := "console=ttyS0 quiet panic=-1 net.ifnames=0 watchdog_thresh=60 rcupdate.rcu_cpu_stall_timeout=120 kfence.sample_interval=100 " + c.Cmdline
	threads := "single"
	if c.Parallel {
		threads = "multi"
	}
	args := []string{
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-machine", "q35", "-accel", "tcg,thread=" + threads, "-cpu", CPU,
		"-smp", strconv.Itoa(c.CPUs), "-m", strconv.Itoa(c.MemMiB),
		"-kernel", g.Kernel.Image, "-initrd", filepath.Join(g.dir, "initrd"), "-append", cmdline,
		"-serial", "file:" + g.consolePath(),
		"-device", "virtio-serial-pci", "-chardev", "socket,id=agent,path=" + g.agentPath() + ",server=on,wait=off",
		"-device", "virtserialport,chardev=agent,name=" + wire.Port,
		"-fsdev", "local,id=root,path=/,readonly=on,security_model=none,multidevs=remap",
		"-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
	}
	argv := append(g.inNamespace(), "qemu-system-x86_64")
	argv = append(append(argv, args...), netArgs...)
	if err := g.startQEMU(argv); err != nil {
		return err
	}
	if err := g.connect(); err != nil {
		return err
	}
	for _, m := range c.Modules {
		if out, err := g.try("modprobe", m); err != nil {
			return fmt.Errorf("modprobe %s: %w: %s", m, err, out)
		}
	}
	return nil
}

func (g *Guest) consolePath() string { return filepath.Join(g.dir, "console.log") }
func (g *Guest) agentPath() string   { return filepath.Join(g.dir, "agent") }

func (g *Guest) startQEMU(argv []string) error {
	log, err := os.Create(filepath.Join(g.dir, "qemu.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	g.qemu = cmd.Process
	go func() {
		_ = cmd.Wait()
		close(g.gone)
	}()
	return nil
}

// connect waits for the agent to say that it is up.
func (g *Guest) connect() error {
	up := make(chan error, 1)
	limit := time.After(bootLimit)
	for {
		conn, err := net.Dial("unix", g.agentPath())
		if err == nil {
			g.conn, g.out = conn, gob.NewEncoder(conn)
			in := gob.NewDecoder(conn)
			go func() {
				var hello wire.Event
				err := in.Decode(&hello)
				up <- err
				if err == nil {
					g.receive(in)
				}
			}()
			break
		}
		select {
		case <-g.gone:
			log, _ := os.ReadFile(filepath.Join(g.dir, "qemu.log"))
			return fmt.Errorf("qemu ended: %s", log)
		case <-limit:
			return fmt.Errorf("qemu does not listen: %w", err)
		case <-time.After(20 * time.Millisecond):
		}
	}
	select {
	case err := <-up:
		if err != nil {
			return fmt.Errorf("%w: the guest ended: %w", errNoAgent, err)
		}
		return nil
	case <-limit:
		return fmt.Errorf("%w within %v", errNoAgent, bootLimit)
	}
}

var (
	errNoAgent = errors.New("the guest's agent did not come up")
	errCrashed = errors.New("the guest crashed on its way up")
)

// Stop ends the guest. It is cut off, not shut down: nothing of it lasts.
func (g *Guest) Stop() {
	g.stopOnce.Do(func() {
		if g.qemu != nil {
			_ = g.qemu.Kill()
			<-g.gone
		}
		if g.conn != nil {
			g.conn.Close()
		}
		g.net.tearDown()
		os.RemoveAll(g.dir)
	})
}
