package doctor

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// Host is a machine to be checked. DefaultHost is this one; tests have others.
type Host struct {
	Root       string // folder that has proc, sys and dev
	UID        int
	MemLock    uint64 // bytes that a process may lock
	Uring      func() error
	Landlock   func() (version int, err error)
	ClockWrong func() bool // the clock is not synchronised
	LookPath   func(program string) error
}

// DefaultHost returns the machine that the process runs on.
func DefaultHost() Host {
	h := Host{Root: "/", UID: os.Geteuid(), Uring: uring.Supported, Landlock: landlock, ClockWrong: clockWrong, LookPath: func(p string) error {
		_, err := exec.LookPath(p)
		return err
	}}
	var r unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &r) == nil {
		h.MemLock = r.Cur
	}
	return h
}

// Check runs every check of the machine, in the order of its report.
func (h Host) Check() (all []Finding) {
	for _, check := range []func() []Finding{
		h.uring, h.frontEnds, h.fuse, h.rdma, h.memLock, h.mtu, h.clock, h.hugePages, h.governor, h.sandbox,
	} {
		all = append(all, check()...)
	}
	return all
}

func one(check, subject string, o Outcome, text, do string) []Finding {
	return []Finding{{check, subject, o, text, do}}
}

// text is the content of a file below the root without spaces around it; empty if
// it cannot be read.
func (h Host) text(name string) string {
	b, _ := os.ReadFile(filepath.Join(h.Root, name))
	return strings.TrimSpace(string(b))
}

func (h Host) exists(name string) bool {
	_, err := os.Stat(filepath.Join(h.Root, name))
	return err == nil
}

// mayUse is the error of opening a node for reading and writing.
func (h Host) mayUse(name string) error {
	f, err := os.OpenFile(filepath.Join(h.Root, name), os.O_RDWR|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

func (h Host) uring() []Finding {
	if err := h.Uring(); err != nil {
		return one("io_uring", "", Note, "storage plugins use threads: "+err.Error(), "allow io_uring (sysctl kernel.io_uring_disabled=0, the seccomp profile of the container) if speed matters")
	}
	return one("io_uring", "", OK, "works", "")
}

// frontEnds are the kernel's drivers that make disks of mapped devices.
func (h Host) frontEnds() (out []Finding) {
	switch {
	case !h.exists("dev/ublk-control"):
		out = append(out, Finding{"module", "ublk_drv", Note, "not loaded: mapped devices are no ublk disks", "modprobe ublk_drv (Linux 6.0)"})
	case h.mayUse("dev/ublk-control") != nil:
		out = append(out, Finding{"permissions", "/dev/ublk-control", Note, "this user may not open it", "run the client daemon as root for /dev/ublkbN"})
	default:
		out = append(out, Finding{"module", "ublk_drv", OK, "loaded", ""})
	}
	if h.exists("sys/module/nbd") || h.exists("sys/block/nbd0") {
		return append(out, Finding{"module", "nbd", OK, "loaded", ""})
	}
	return append(out, Finding{"module", "nbd", Note, "not loaded: mapped devices are no /dev/nbdN", "modprobe nbd, where ublk_drv is not there"})
}

// fuse carries the tree of control files.
func (h Host) fuse() []Finding {
	const what = "control files need it; everything else works without"
	switch {
	case !h.exists("dev/fuse"):
		return one("FUSE", "", Note, "there is no /dev/fuse: "+what, "modprobe fuse, or give the container /dev/fuse")
	case h.mayUse("dev/fuse") != nil:
		return one("FUSE", "", Note, "this user may not open /dev/fuse: "+what, "give the user access to /dev/fuse")
	case h.UID != 0 && h.LookPath("fusermount3") != nil:
		return one("FUSE", "", Note, "fusermount3 is not installed: "+what, "install the package fuse3")
	}
	return one("FUSE", "", OK, "works", "")
}

// rdma checks the RDMA devices and the parts of user space for them.
func (h Host) rdma() (out []Finding) {
	ports, _ := filepath.Glob(filepath.Join(h.Root, "sys/class/infiniband/*/ports/*"))
	if len(ports) == 0 {
		return one("RDMA", "", OK, "no RDMA device; the fabrics iwarp and rocev2 need none", "")
	}
	for _, p := range ports {
		name := filepath.Base(filepath.Dir(filepath.Dir(p))) + ":" + filepath.Base(p)
		state, _ := os.ReadFile(filepath.Join(p, "state"))
		if s := strings.TrimSpace(string(state)); strings.Contains(s, "ACTIVE") {
			out = append(out, Finding{"RDMA", name, OK, s, ""})
		} else {
			out = append(out, Finding{"RDMA", name, Warning, "the port is not active: " + s, "check cable, switch and link (`rdma link`)"})
		}
	}
	for module, node := range map[string]string{"rdma_ucm": "dev/infiniband/rdma_cm", "ib_uverbs": "dev/infiniband"} {
		if !h.exists(node) {
			out = append(out, Finding{"module", module, Warning, "not loaded: the fabric ibverbs does not work", "modprobe " + module})
		}
	}
	if h.exists("dev/infiniband/rdma_cm") && h.mayUse("dev/infiniband/rdma_cm") != nil {
		out = append(out, Finding{"permissions", "/dev/infiniband/rdma_cm", Warning, "this user may not open it: the fabric ibverbs does not work", "give the user access, or run the daemon as root"})
	}
	return out
}

// lockedPath is the memory locked by a path over ibverbs by default, in bytes.
const lockedPath = 64 << 20

func (h Host) memLock() []Finding {
	devices, _ := filepath.Glob(filepath.Join(h.Root, "sys/class/infiniband/*"))
	amount := "no limit"
	if h.MemLock != unix.RLIM_INFINITY {
		amount = strconv.FormatUint(h.MemLock>>10, 10) + " KiB"
	}
	if len(devices) > 0 && h.UID != 0 && h.MemLock < lockedPath {
		return one("locked memory", "", Warning, amount+"; a path over ibverbs locks 64 MiB with defaults", "raise LimitMEMLOCK= of the unit or `ulimit -l`, or grant CAP_IPC_LOCK")
	}
	return one("locked memory", "", OK, amount+"; only the fabric ibverbs locks memory", "")
}

// mtu checks the interfaces that are up.
func (h Host) mtu() (out []Finding) {
	names, _ := filepath.Glob(filepath.Join(h.Root, "sys/class/net/*"))
	for _, n := range names {
		name := filepath.Base(n)
		size, err := strconv.Atoi(h.text("sys/class/net/" + name + "/mtu"))
		state := h.text("sys/class/net/" + name + "/operstate")
		if err != nil || name == "lo" || state != "up" {
			continue
		}
		switch {
		case size < 1280:
			out = append(out, Finding{"MTU", name, Warning, fmt.Sprintf("%d bytes: less than IPv6 needs, and slow", size), "ip link set " + name + " mtu 1500"})
		case size < 4200:
			out = append(out, Finding{"MTU", name, Note, fmt.Sprintf("%d bytes; a block of 4 KiB takes several packets", size), "set 9000 if every switch and host of the storage network can"})
		default:
			out = append(out, Finding{"MTU", name, OK, fmt.Sprintf("%d bytes", size), ""})
		}
	}
	return out
}

// clock checks the clocks that the times of requests and logs depend on.
func (h Host) clock() []Finding {
	source := h.text("sys/devices/system/clocksource/clocksource0/current_clocksource")
	if slices.Contains([]string{"hpet", "acpi_pm", "jiffies"}, source) {
		return one("clock", "", Warning, "the clock source "+source+" is slow, and each batch of requests reads it", "find out in the kernel's log why tsc is not used")
	}
	if h.ClockWrong() {
		return one("clock", "", Note, "not synchronised: times in the logs of several hosts do not compare", "run chrony or systemd-timesyncd")
	}
	return one("clock", "", OK, "synchronised, source "+source, "")
}

func (h Host) hugePages() []Finding {
	setting := h.text("sys/kernel/mm/transparent_hugepage/shmem_enabled")
	_, chosen, _ := strings.Cut(setting, "[")
	chosen, _, _ = strings.Cut(chosen, "]")
	switch chosen {
	case "always", "within_size", "force", "advise":
		return one("huge pages", "", OK, "shared memory may use them: "+chosen, "")
	case "":
		return one("huge pages", "", OK, "this kernel has none for shared memory; nothing needs them", "")
	}
	return one("huge pages", "", Note, "shared memory does not use them ("+chosen+"); nothing needs them", "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, if a measurement shows that it helps")
}

func (h Host) governor() []Finding {
	files, _ := filepath.Glob(filepath.Join(h.Root, "sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"))
	counts := map[string]int{}
	for _, f := range files {
		b, _ := os.ReadFile(f)
		counts[strings.TrimSpace(string(b))]++
	}
	switch {
	case len(counts) == 0:
		return one("CPU governor", "", OK, "the frequency is not set by this kernel", "")
	case counts["performance"] == len(files):
		return one("CPU governor", "", OK, "performance", "")
	}
	var names []string
	for n := range counts {
		names = append(names, n)
	}
	slices.Sort(names)
	return one("CPU governor", "", Note, strings.Join(names, ", ")+": single requests take longer while CPUs are slow", "cpupower frequency-set -g performance, if latency matters")
}

func (h Host) sandbox() []Finding {
	v, err := h.Landlock()
	if err != nil {
		return one("landlock", "", Note, "not there: "+err.Error(), "add landlock to the kernel's lsm= list, if daemons are to be confined")
	}
	return one("landlock", "", OK, fmt.Sprintf("version %d", v), "")
}

// landlock asks for the version of the kernel's interface.
func landlock() (int, error) {
	const createRulesetVersion = 1
	v, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, createRulesetVersion)
	if errno != 0 {
		return 0, errno
	}
	return int(v), nil
}

func clockWrong() bool {
	var t unix.Timex
	_, err := unix.Adjtimex(&t)
	return err == nil && t.Status&unix.STA_UNSYNC != 0
}

// RouteMTU is the largest packet in bytes that the kernel sends to the host of addr,
// a "host:port"; 0: not known. No packet is sent for it.
func RouteMTU(addr string) int {
	conn, err := net.Dial("udp", addr)
	if err != nil {
		return 0
	}
	defer conn.Close()
	raw, err := conn.(*net.UDPConn).SyscallConn()
	if err != nil {
		return 0
	}
	level, option := unix.IPPROTO_IP, unix.IP_MTU
	if a := conn.RemoteAddr().(*net.UDPAddr); a.IP.To4() == nil {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU
	}
	size := 0
	_ = raw.Control(func(fd uintptr) { size, _ = unix.GetsockoptInt(int(fd), level, option) })
	return size
}
