package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// traced is a tracepoint and what of it is recorded, on all CPUs.
type traced struct{ event, filter string }

var schedule = []traced{{"sched:sched_switch", ""}, {"sched:sched_waking", ""}}

// few are the calls that move bytes of a request. An event costs about a microsecond, and
// a pump that looks around makes many calls.
func few() []traced {
	var ids []string
	for id, c := range known {
		if c.call == sends && id != unix.SYS_WRITE {
			ids = append(ids, fmt.Sprintf("id == %d", id))
		}
	}
	slices.Sort(ids)
	return append(slices.Clone(schedule), traced{"raw_syscalls:sys_enter", strings.Join(ids, " || ")}, traced{"raw_syscalls:sys_exit", fmt.Sprintf("ret > %d", doorbell)})
}

// every are all calls.
func every() []traced {
	return append(slices.Clone(schedule), traced{"raw_syscalls:sys_enter", ""}, traced{"raw_syscalls:sys_exit", ""})
}

// perfOptions select the events.
func perfOptions(events []traced) (args []string) {
	for _, e := range events {
		if args = append(args, "-e", e.event); e.filter != "" {
			args = append(args, "--filter", e.filter)
		}
	}
	return args
}

// errRoot is the reason why nothing can be recorded.
var errRoot = fmt.Errorf("tracepoints of all CPUs need root: %w", syscall.EPERM)

// check reports whether events can be recorded here.
func check() error {
	if os.Geteuid() != 0 {
		return errRoot
	}
	for _, tool := range []string{"perf", "fio"} {
		if _, err := exec.LookPath(tool); err != nil {
			return fmt.Errorf("%w; on Debian: apt-get install linux-perf fio", err)
		}
	}
	args := append([]string{"record", "-q", "-a", "-o", os.DevNull}, perfOptions(few())...)
	if out, err := exec.Command("perf", append(args, "--", "true")...).CombinedOutput(); err != nil {
		return fmt.Errorf("perf cannot record switches, wake-ups and system calls; does this kernel have their tracepoints (CONFIG_FTRACE_SYSCALLS)? %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// record returns the events of d, as perf script prints them.
func record(ctx context.Context, dir string, events []traced, d time.Duration) ([]byte, error) {
	data := filepath.Join(dir, "perf.data")
	// All is written at the end: nothing of perf runs meanwhile.
	args := append([]string{"record", "-q", "-a", "--overwrite", "-m", "8192", "-o", data}, perfOptions(events)...)
	args = append(args, "--", "sleep", strconv.FormatFloat(d.Seconds(), 'f', -1, 64))
	if out, err := exec.CommandContext(ctx, "perf", args...).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("perf record: %w: %s", err, bytes.TrimSpace(out))
	}
	var errs bytes.Buffer
	cmd := exec.CommandContext(ctx, "perf", "script", "-i", data, "--ns", "-F", "comm,tid,cpu,time,event,trace")
	cmd.Stderr = &errs
	text, err := cmd.Output()
	return text, errors.Join(err, os.Remove(data))
}
