package doctor

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// host makes a machine of files; those of an empty text are folders.
func host(t *testing.T, files map[string]string) Host {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return Host{
		Root: root, MemLock: 1 << 40, Uring: func() error { return nil }, Landlock: func() (int, error) { return 4, nil },
		ClockWrong: func() bool { return false }, LookPath: func(string) error { return nil },
	}
}

func TestFindings(t *testing.T) {
	rxe := map[string]string{
		"sys/class/infiniband/rxe0/ports/1/state": "4: ACTIVE", "dev/infiniband/rdma_cm": "", "dev/infiniband/uverbs0": "",
	}
	for _, c := range []struct {
		name    string
		files   map[string]string
		change  func(*Host)
		check   string
		outcome Outcome
		text    string // text of the finding or of its remedy
	}{
		{"io_uring", nil, nil, "io_uring", OK, "works"},
		{"no io_uring", nil, func(h *Host) { h.Uring = func() error { return errors.New("seccomp") } }, "io_uring", Note, "seccomp"},
		{"no ublk", nil, nil, "module", Note, "modprobe ublk_drv"},
		{"ublk", map[string]string{"dev/ublk-control": ""}, nil, "module", OK, "loaded"},
		{"no fuse", nil, nil, "FUSE", Note, "modprobe fuse"},
		{"fuse without its program", map[string]string{"dev/fuse": ""}, func(h *Host) { h.UID = 1000; h.LookPath = func(string) error { return syscall.ENOENT } }, "FUSE", Note, "fuse3"},
		{"fuse", map[string]string{"dev/fuse": ""}, nil, "FUSE", OK, ""},
		{"no RDMA", nil, nil, "RDMA", OK, "need none"},
		{"RDMA", rxe, nil, "RDMA", OK, "ACTIVE"},
		{"RDMA down", map[string]string{"sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN"}, nil, "RDMA", Warning, "not active"},
		{"RDMA without its modules", map[string]string{"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE"}, nil, "module", Warning, "modprobe"},
		{"little memory to lock", rxe, func(h *Host) { h.UID, h.MemLock = 1000, 8<<20 }, "locked memory", Warning, "LimitMEMLOCK"},
		{"little memory to lock, and no need", nil, func(h *Host) { h.UID, h.MemLock = 1000, 8<<20 }, "locked memory", OK, "8192 KiB"},
		{"small MTU", map[string]string{"sys/class/net/tun0/mtu": "1000", "sys/class/net/tun0/operstate": "up"}, nil, "MTU", Warning, "1000"},
		{"usual MTU", map[string]string{"sys/class/net/eth0/mtu": "1500", "sys/class/net/eth0/operstate": "up"}, nil, "MTU", Note, "9000"},
		{"large MTU", map[string]string{"sys/class/net/eth0/mtu": "9000", "sys/class/net/eth0/operstate": "up"}, nil, "MTU", OK, "9000"},
		{"clock", nil, nil, "clock", OK, "synchronised"},
		{"clock runs free", nil, func(h *Host) { h.ClockWrong = func() bool { return true } }, "clock", Note, "chrony"},
		{"slow clock", map[string]string{"sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet"}, nil, "clock", Warning, "slow"},
		{"huge pages", map[string]string{"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force"}, nil, "huge pages", OK, "advise"},
		{"no huge pages", map[string]string{"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size advise [never] deny force"}, nil, "huge pages", Note, "never"},
		{"governor", map[string]string{"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance"}, nil, "CPU governor", OK, "performance"},
		{"slow governor", map[string]string{"sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance", "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave"}, nil, "CPU governor", Note, "cpupower"},
		{"landlock", nil, nil, "landlock", OK, "version 4"},
		{"no landlock", nil, func(h *Host) { h.Landlock = func() (int, error) { return 0, syscall.EOPNOTSUPP } }, "landlock", Note, "lsm="},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := host(t, c.files)
			if c.change != nil {
				c.change(&h)
			}
			found := h.Check()
			for _, f := range found {
				if f.Check == c.check && f.Outcome == c.outcome && strings.Contains(f.Text+f.Do, c.text) {
					return
				}
			}
			t.Errorf("no %s of %s with %q in %+v", c.outcome, c.check, c.text, found)
		})
	}
}

func TestWhatIsNotInOrderSaysWhatToDo(t *testing.T) {
	for _, f := range append(DefaultHost().Check(), host(t, nil).Check()...) {
		if f.Outcome != OK && f.Do == "" || f.Text == "" || f.Check == "" {
			t.Errorf("%+v", f)
		}
	}
}

func TestWorst(t *testing.T) {
	if got := Worst([]Finding{{Outcome: Note}, {Outcome: Problem}, {Outcome: OK}}); got != Problem {
		t.Errorf("worst is %s", got)
	}
	if got := Worst(nil); got != OK {
		t.Errorf("worst of nothing is %s", got)
	}
}

func TestRouteMTU(t *testing.T) {
	if got := RouteMTU("127.0.0.1:1234"); got < 1280 {
		t.Errorf("of the loopback interface it is %d", got)
	}
	if got := RouteMTU("not an address"); got != 0 {
		t.Errorf("of no address it is %d", got)
	}
}
