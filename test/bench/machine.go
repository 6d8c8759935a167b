package main

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/machine"
	"github.com/rnbd-go/rnbd/test/lab"
)

// platform is where the results come from.
type platform struct {
	CPU      string            `json:"cpu"`
	Cores    int               `json:"cores"`
	Kernel   string            `json:"kernel"`
	MemoryMB uint64            `json:"memory_mb"`
	Go       string            `json:"go"`
	Versions map[string]string `json:"versions"`
}

func thisPlatform() platform {
	m := platform{CPU: machine.CPU(), Cores: runtime.NumCPU(), Kernel: machine.Kernel() + " " + runtime.GOARCH, Go: runtime.Version(), Versions: versions()}
	var i unix.Sysinfo_t
	if unix.Sysinfo(&i) == nil {
		m.MemoryMB = uint64(i.Totalram) * uint64(i.Unit) >> 20
	}
	return m
}

// versions asks every program that may take part.
func versions() map[string]string {
	v := map[string]string{}
	for _, argv := range [][]string{
		{"fio", "--version"}, {"nbdkit", "--version"}, {"qemu-nbd", "--version"},
		{"qemu-storage-daemon", "--version"}, {"nbd-server", "-V"},
	} {
		if line := firstLine(argv); line != "" {
			v[argv[0]] = line
		}
	}
	v["rnbd"] = ownVersion()
	return v
}

// netVersions asks those that take part with -net.
func netVersions() map[string]string {
	return map[string]string{"iperf3": firstLine([]string{"iperf3", "--version"}), "wireguard-go": wireguardVersion(), "rnbd": ownVersion()}
}

// firstLine returns the first line that a program prints.
func firstLine(argv []string) string {
	out, _ := exec.Command(argv[0], argv[1:]...).CombinedOutput()
	line, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return line
}

func ownVersion() string {
	if out, err := exec.Command("git", "-C", lab.Root(), "describe", "--always", "--dirty").Output(); err == nil {
		return strings.TrimSpace(string(out))
	}
	return "development"
}

// busy returns the seconds that all CPUs have worked, and those that the
// hypervisor has kept for itself.
func busy() (work, stolen float64) {
	b, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(b), "\n")
	f := strings.Fields(line)
	if len(f) < 9 {
		return 0, 0
	}
	at := func(i int) float64 {
		v, _ := strconv.ParseFloat(f[i], 64)
		return v / clockTick
	}
	// cpu user nice system idle iowait irq softirq steal
	return at(1) + at(2) + at(3) + at(6) + at(7), at(8)
}

// kernelThreads returns the CPU seconds of the threads of the kernel: their
// work for loop devices and the network is no foreign load.
func kernelThreads() (sum float64) {
	for _, pid := range lab.Children(kthreadd) {
		b, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/schedstat")
		if f := strings.Fields(string(b)); len(f) > 0 {
			ns, _ := strconv.ParseFloat(f[0], 64)
			sum += ns / 1e9
		}
	}
	return sum
}

// kthreadd is the parent of all threads of the kernel.
const kthreadd = 2
