// Command agent is the first process of a test guest: it sets the guest up on the
// host's files and then runs the commands of the host.
//
// It is linked statically and is the only program of the initial ram disk. As
// process 1 it loads the modules of the ram disk, mounts the host's root
// read-only (9p) under a file system in memory, moves there, and starts itself
// again as the agent; then it only collects orphaned processes.
//
// Where the configuration names a block device, that has the root, and the agent
// gives way to the init there.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm/wire"
)

func main() {
	if os.Getpid() != 1 {
		if err := serve(); err != nil {
			fmt.Fprintln(os.Stderr, "agent:", err)
			os.Exit(1)
		}
		return
	}
	if err := setUp(); err != nil {
		fmt.Fprintln(os.Stderr, "AGENT FAILED:", err)
	} else if err := runAgent(); err != nil {
		fmt.Fprintln(os.Stderr, "AGENT FAILED:", err)
	}
	unix.Sync()
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

// runAgent returns when the agent ends.
func runAgent() error {
	p, err := os.StartProcess("/proc/self/exe", []string{"agent"}, &os.ProcAttr{
		Env:   []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C"},
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr},
	})
	if err != nil {
		return err
	}
	for {
		pid, err := unix.Wait4(-1, nil, 0, nil)
		if pid == p.Pid || err == unix.ECHILD {
			return nil
		}
	}
}

type mount struct {
	source, target, kind string
	flags                uintptr
	data                 string
}

func (m mount) do() error {
	if err := os.MkdirAll(m.target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", m.source, m.target, err)
	}
	return nil
}

func setUp() error {
	cfg, err := config()
	if err != nil {
		return err
	}
	first := []mount{{"dev", "/dev", "devtmpfs", 0, ""}, {"proc", "/proc", "proc", 0, ""}, {"sys", "/sys", "sysfs", 0, ""}}
	for _, m := range first {
		if err := m.do(); err != nil {
			return err
		}
	}
	for _, m := range cfg.Modules {
		if err := load(m); err != nil {
			return err
		}
	}
	if cfg.Root != "" {
		return boot(cfg.Root)
	}
	if err := root(cfg); err != nil {
		return err
	}
	_ = os.WriteFile("/proc/sys/kernel/printk", []byte("7"), 0)
	_ = os.WriteFile("/proc/sys/kernel/hostname", []byte("guest"), 0)
	return exec.Command("/bin/ip", "link", "set", "lo", "up").Run()
}

func config() (c wire.Config, err error) {
	b, err := os.ReadFile("/config")
	if err != nil {
		return c, err
	}
	return c, json.Unmarshal(b, &c)
}

func load(path string) error {
	image, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := unix.InitModule(image, ""); err != nil && err != unix.EEXIST {
		return fmt.Errorf("load %s: %w", path, err)
	}
	return os.Remove(path)
}

// boot makes the file system of a block device the root, read-only, and becomes
// its init.
func boot(device string) error {
	for range 100 { // until its driver has found it
		if _, err := os.Stat(device); err == nil {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	mounts := []mount{{device, "/new", "ext4", unix.MS_RDONLY, ""}}
	for _, name := range []string{"/dev", "/proc", "/sys"} {
		mounts = append(mounts, mount{name, "/new" + name, "", unix.MS_MOVE, ""})
	}
	for _, m := range mounts {
		if err := m.do(); err != nil {
			return err
		}
	}
	if err := os.Chdir("/new"); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return unix.Exec("/sbin/init", []string{"/sbin/init"}, []string{"TERM=linux"})
}

// root makes the host's files the root of this process.
func root(cfg wire.Config) error {
	mounts := []mount{
		// A change by the host is seen when a name is looked up for the first
		// time.
		{"root", "/host", "9p", unix.MS_RDONLY, "trans=virtio,version=9p2000.L,msize=512000,cache=loose"},
		{"rw", "/rw", "tmpfs", 0, "size=75%"},
	}
	for _, m := range mounts {
		if err := m.do(); err != nil {
			return err
		}
	}
	for _, d := range []string{"/rw/upper", "/rw/work"} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	mounts = []mount{
		{"overlay", "/new", "overlay", 0, "lowerdir=/host,upperdir=/rw/upper,workdir=/rw/work"},
		{"/dev", "/new/dev", "", unix.MS_MOVE, ""},
		{"/proc", "/new/proc", "", unix.MS_MOVE, ""},
		{"/sys", "/new/sys", "", unix.MS_MOVE, ""},
		{"pts", "/new/dev/pts", "devpts", 0, ""},
		{"shm", "/new/dev/shm", "tmpfs", 0, ""},
		{"run", "/new/run", "tmpfs", 0, "mode=755"},
		{"debug", "/new/sys/kernel/debug", "debugfs", 0, ""},
		{filepath.Join("/new", cfg.Tree), "/new/usr/lib/modules", "", unix.MS_BIND, ""},
	}
	for _, m := range mounts {
		if err := m.do(); err != nil {
			return err
		}
	}
	if err := unix.Chroot("/new"); err != nil {
		return err
	}
	return os.Chdir("/")
}
