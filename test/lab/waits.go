package lab

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// waits says where the threads of the lab's daemons and of their plugins are in the
// kernel: a test that fails because something hangs shows it.
func (l *Lab) waits() string {
	var out strings.Builder
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, name := range all {
		args, _ := os.ReadFile(name)
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(name))); err == nil && pid != os.Getpid() && bytes.Contains(args, []byte(l.Dir)) {
			for _, pid := range append([]int{pid}, Children(pid)...) {
				fmt.Fprintf(&out, "%s\n", threads(pid))
			}
		}
	}
	return out.String()
}

// threads are a process's name and the states of its threads, with the function of
// the kernel that each waits in.
func threads(pid int) string {
	comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	var states []string
	for _, task := range tasks {
		stat, _ := os.ReadFile(filepath.Join(task, "stat"))
		wchan, _ := os.ReadFile(filepath.Join(task, "wchan"))
		_, rest, _ := strings.Cut(string(stat), ") ")
		states = append(states, fmt.Sprintf("%.1s %s", rest, wchan))
	}
	slices.Sort(states)
	return fmt.Sprintf("%s (%d): %s", bytes.TrimSpace(comm), pid, strings.Join(states, ", "))
}
