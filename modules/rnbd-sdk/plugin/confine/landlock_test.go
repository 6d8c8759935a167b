package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// The test binary is also the process in a domain.
const abiKey = "RNBD_TEST_ABI"

func TestMain(m *testing.M) {
	if os.Getenv(abiKey) != "" {
		tryInDomain()
		return
	}
	os.Exit(m.Run())
}

// tryInDomain enters a domain of an old ABI with the first argument as its only folder,
// and writes the result of each attempt.
func tryInDomain() {
	runtime.LockOSThread()
	abi, _ := strconv.Atoi(os.Getenv(abiKey))
	inside, outside, addr := os.Args[1], os.Args[2], os.Args[3]
	rules, err := openRules([]Rule{{Path: inside, Access: Write, Required: true}})
	if err == nil {
		err = unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	}
	if err == nil {
		err = restrictFiles(abi, rules, false)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	open := func(path string, flags int) error {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0o600)
		if err == nil {
			unix.Close(fd)
		}
		return err
	}
	connect := func() error {
		a, err := net.ResolveTCPAddr("tcp", addr)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		if err != nil {
			return err
		}
		return unix.Connect(fd, &unix.SockaddrInet4{Port: a.Port, Addr: [4]byte(a.IP.To4())})
	}
	could := map[string]string{}
	for what, err := range map[string]error{
		"read inside":     open(filepath.Join(inside, "f"), unix.O_RDONLY),
		"write inside":    open(filepath.Join(inside, "f"), unix.O_RDWR),
		"truncate inside": unix.Truncate(filepath.Join(inside, "f"), 10),
		"create inside":   open(filepath.Join(inside, "new"), unix.O_RDWR|unix.O_CREAT),
		"remove inside":   unix.Unlink(filepath.Join(inside, "f2")),
		"read":            open(filepath.Join(outside, "f"), unix.O_RDONLY),
		"write":           open(filepath.Join(outside, "f"), unix.O_RDWR),
		"list":            open(outside, unix.O_RDONLY|unix.O_DIRECTORY),
		"truncate":        unix.Truncate(filepath.Join(outside, "f"), 10),
		"connect":         connect(),
		"signal":          syscall.Kill(os.Getppid(), 0),
	} {
		could[what] = "yes"
		if err != nil {
			could[what] = err.Error()
		}
	}
	_ = json.NewEncoder(os.Stdout).Encode(could)
}

// Each ABI that this kernel knows refuses what it can.
func TestDomainsOfOldKernels(t *testing.T) {
	newest, err := LandlockABI()
	if err != nil {
		t.Skip(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for abi := 1; abi <= min(newest, bestABI); abi++ {
		inside, outside := t.TempDir(), t.TempDir()
		for _, f := range []string{filepath.Join(inside, "f"), filepath.Join(inside, "f2"), filepath.Join(outside, "f")} {
			if err := os.WriteFile(f, make([]byte, 100), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(exe, inside, outside, l.Addr().String())
		cmd.Env = append(os.Environ(), abiKey+"="+strconv.Itoa(abi), "GOCOVERDIR="+t.TempDir())
		out, err := cmd.Output()
		if err != nil {
			var exit *exec.ExitError
			errors.As(err, &exit)
			t.Fatalf("ABI %d: %v: %s", abi, err, exit.Stderr)
		}
		var could map[string]string
		if err := json.Unmarshal(out, &could); err != nil {
			t.Fatalf("ABI %d: %v in %q", abi, err, out)
		}
		missing := ""
		if abi < bestABI {
			missing = lacks(abi)
		}
		for what, refused := range map[string]bool{
			"read inside": false, "write inside": false, "truncate inside": false, "create inside": true, "remove inside": true,
			"read": true, "write": true, "list": true,
			"truncate": !strings.Contains(missing, "truncation"),
			"connect":  !strings.Contains(missing, "TCP"),
			"signal":   !strings.Contains(missing, "signals"),
		} {
			if (could[what] != "yes") != refused {
				t.Errorf("ABI %d: %s: %q", abi, what, could[what])
			}
		}
	}
}

func TestWhatOldKernelsLack(t *testing.T) {
	for abi, want := range map[int]string{
		1: "truncation, TCP, controls of devices, signals and abstract sockets",
		2: "truncation, TCP, controls of devices, signals and abstract sockets",
		3: "TCP, controls of devices, signals and abstract sockets",
		4: "controls of devices, signals and abstract sockets",
		5: "signals and abstract sockets",
	} {
		if got := lacks(abi); got != want {
			t.Errorf("ABI %d: %s", abi, got)
		}
	}
}

// Paths that are optional may be absent, others are an error that names them.
func TestRulesOfAbsentPaths(t *testing.T) {
	absent := filepath.Join(t.TempDir(), "absent")
	rules, err := openRules([]Rule{{Path: absent, Access: Read}, {Path: "/dev/null", Access: Write, Required: true}})
	if err != nil || len(rules) != 1 {
		t.Errorf("%v, %v", rules, err)
	}
	more, err := openRules([]Rule{{Path: absent, Access: Read, Required: true}})
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), absent) {
		t.Errorf("%v", err)
	}
	for _, r := range append(rules, more...) {
		unix.Close(r.fd)
	}
}
