package kernelvm

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/kernelvm/vm"
)

// The lab itself: the kernel's client maps a device of the kernel's server, in
// one guest, and moves data.
func TestLab_KernelToKernel(t *testing.T) {
	g := vm.Boot(t, vm.Config{})
	g.RXE(t, "rxe0", "10.1.0.1/24")
	g.Modprobe(t, "brd", "rd_nr=1", "rd_size=65536")
	g.Modprobe(t, "rnbd-server")
	g.Modprobe(t, "rnbd-client")
	g.WriteFile(t, "/sys/class/rnbd-client/ctl/map_device", "sessname=lab path=ip:10.1.0.1@ip:10.1.0.1 device_path=/dev/ram0")
	g.Run(t, "dd", "if=/dev/urandom", "of=/tmp/lab-kernel-to-kernel.data", "bs=1M", "count=4")
	g.Run(t, "dd", "if=/tmp/lab-kernel-to-kernel.data", "of=/dev/rnbd0", "bs=256k", "oflag=direct")
	g.Run(t, "cmp", "-n", "4194304", "/tmp/lab-kernel-to-kernel.data", "/dev/ram0")
	if s := g.ReadFile(t, "/sys/block/rnbd0/rnbd/state"); s != "open\n" {
		t.Errorf("state is %q", s)
	}
	g.WriteFile(t, "/sys/block/rnbd0/rnbd/unmap_device", "normal")
	g.Rmmod(t, "rnbd_client", "rnbd_server")
}

// The lab's users rely on exit codes, errnos, background processes, and
// failure of a test by a kernel's complaint.
func TestLab_Guest(t *testing.T) {
	g := vm.Boot(t, vm.Config{CPUs: 1, MemMiB: 512})
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	var failed *vm.Error
	if out, err := g.Try(ctx, "sh", "-c", "echo said; exit 3"); out != "said\n" || !errors.As(err, &failed) || failed.Code != 3 {
		t.Errorf("output %q, error %v; want exit code 3", out, err)
	}
	if err := g.Write("/proc/sys/vm/swappiness", "9999"); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("refused write: %v, want EINVAL", err)
	}
	if _, err := g.Read("/nowhere"); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("read: %v, want ENOENT", err)
	}
	p := g.Start(t, "sh", "-c", "echo up; sleep 100")
	for end := time.Now().Add(time.Minute); p.Output() != "up\n" && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	p.Stop()
	if err := p.Wait(time.Second); !errors.As(err, &failed) || failed.Code != 128+int(syscall.SIGTERM) || p.Output() != "up\n" {
		t.Errorf("stopped process: %v, output %q", err, p.Output())
	}
	if lines := vm.Splats(g.KernelLog()); len(lines) > 0 {
		t.Errorf("a fresh guest complains: %q", lines)
	}
	splat := "[  1.0] ------------[ cut here ]------------\n[  1.0] WARNING: CPU: 0 PID: 1 at kernel/x.c:1 f+0x1/0x2\n"
	if lines := vm.Splats(splat); len(lines) != 1 || !strings.Contains(lines[0], "WARNING") {
		t.Errorf("found %q in a splat", lines)
	}
}

// Jump labels are switched by writing over code that the other processor runs.
// An emulator that does not stand it lets the guest die of an int3 that is gone
// from memory, in any test.
func TestLab_CodePatched(t *testing.T) {
	g := vm.Boot(t, vm.Config{MemMiB: 512})
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	_, err := g.Try(ctx, "bash", "-c", `
		end=$((SECONDS + 15))
		for busy in 1 2; do while [ $SECONDS -lt $end ]; do : | :; done & done
		while [ $SECONDS -lt $end ]; do
			for v in 1 0; do
				echo $v > /proc/sys/kernel/sched_schedstats
				echo $v > /proc/sys/kernel/timer_migration
			done
		done
		wait`)
	if err != nil {
		t.Error(err)
	}
}
