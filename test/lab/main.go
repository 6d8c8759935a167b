package lab

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Run runs the tests of a package and returns the exit code; TestMain calls it. The
// tests get a temporary folder of their own (TMPDIR), and Run returns an error code if
// they leave a mount or a process below that folder. With -short, and without -run, only
// the tests named core run; without names all do.
func Run(m *testing.M, core ...string) int {
	flag.Parse()
	if flagValue("test.list") != "" {
		return m.Run()
	}
	if testing.Short() && flagValue("test.run") == "" && len(core) > 0 {
		if err := runOnly(core); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	dir, err := tempFolder()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	Cleanup()
	if err := removeLeftovers(dir); err != nil {
		fmt.Fprintln(os.Stderr, "FAIL: the tests left something behind:", err)
		code = max(code, 1)
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, "FAIL:", err)
		code = max(code, 1)
	}
	return code
}

func flagValue(name string) string { return flag.Lookup(name).Value.String() }

// runOnly selects tests by their names. Each must exist.
func runOnly(names []string) error {
	list, err := exec.Command(os.Args[0], "-test.list=^Test").Output()
	if err != nil {
		return fmt.Errorf("list the tests: %w", err)
	}
	all := strings.Fields(string(list))
	for _, name := range names {
		if !slices.Contains(all, name) {
			return fmt.Errorf("there is no test %s, which -short should run", name)
		}
	}
	fmt.Printf("part of the tests: %d of %d; make check runs all\n", len(names), len(all))
	return flag.Set("test.run", "^("+strings.Join(names, "|")+")$")
}

// tempFolder makes the folder that TMPDIR names from now on. Its name is short, so that
// unix sockets fit below it, and other users may use it as they may use /tmp.
func tempFolder() (string, error) {
	dir, err := os.MkdirTemp("", "t")
	if err != nil {
		return "", err
	}
	return dir, errors.Join(os.Chmod(dir, 0o777|os.ModeSticky), os.Setenv("TMPDIR", dir))
}

// removeLeftovers ends the processes and removes the mounts that use dir, and returns an
// error that names them. Processes get some time to end themselves.
func removeLeftovers(dir string) (err error) {
	deadline := time.Now().Add(Patience)
	var users []int
	for users = processesBelow(dir); len(users) > 0 && time.Now().Before(deadline); users = processesBelow(dir) {
		time.Sleep(50 * time.Millisecond)
	}
	for _, pid := range users {
		cmdline, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
		err = errors.Join(err, fmt.Errorf("process %d: %s", pid, strings.ReplaceAll(string(cmdline), "\x00", " ")))
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
	}
	for _, mount := range UnmountBelow(dir) {
		err = errors.Join(err, fmt.Errorf("mount %s", mount))
	}
	return err
}

// processesBelow returns the processes whose program, working folder or arguments are
// below dir. Dead ones that nobody has waited for do not count.
func processesBelow(dir string) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		proc := filepath.Join("/proc", e.Name())
		exe, _ := os.Readlink(filepath.Join(proc, "exe"))
		cwd, _ := os.Readlink(filepath.Join(proc, "cwd"))
		cmdline, _ := os.ReadFile(filepath.Join(proc, "cmdline"))
		if strings.Contains(exe+"\n"+cwd+"/\n"+string(cmdline), dir+"/") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// UnmountBelow removes the mounts below dir, the innermost first, and returns their
// folders. A mount of FUSE whose server has died is one of them.
func UnmountBelow(dir string) (mounts []string) {
	table, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			if point := mountEscapes.Replace(fields[4]); strings.HasPrefix(point, dir+"/") {
				mounts = append(mounts, point)
			}
		}
	}
	slices.Reverse(mounts)
	for _, point := range mounts {
		if unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) != nil {
			_ = exec.Command("fusermount3", "-u", "-z", point).Run() // it asks for no rights
		}
	}
	return mounts
}

// mountEscapes undoes the escapes of /proc/self/mountinfo (man 5 proc_pid_mountinfo).
var mountEscapes = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
