package confine

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/cgroup"
)

// Descriptors of a launcher. The plugin gets ControlFD and the standard ones.
const (
	ControlFD    = 3 // the plugin's, left alone
	profileFD    = 4 // the profile, as JSON
	reportFD     = 5 // where the report goes
	executableFD = 6 // the file to execute
)

// exitFailed is the exit code of a launcher that did not execute the plugin.
const exitFailed = 126

// Exec is the main function of a launcher: `rnbd confine-exec`.
func Exec() {
	runtime.LockOSThread()
	var r Report
	err := run(&r)
	r.Err = err.Error()
	send(&r)
	fmt.Fprintln(os.Stderr, err)
	os.Exit(exitFailed)
}

// run returns only with an error.
func run(r *Report) error {
	for _, fd := range []int{profileFD, reportFD, executableFD} {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return errors.New("this command starts the plugins of a daemon; it is not for users")
		}
	}
	var p Profile
	if err := json.NewDecoder(os.NewFile(profileFD, "profile")).Decode(&p); err != nil {
		return fmt.Errorf("read the profile of a plugin: %w", err)
	}
	path, err := emptyPath()
	if err != nil {
		return fmt.Errorf("map memory: %w", err)
	}
	if err := apply(&p, r, path); err != nil {
		return err
	}
	if missing := r.Missing(); p.Strict && len(missing) > 0 {
		return fmt.Errorf("--confine=strict: this host does not provide %s; use --confine=try to run without", list(missing))
	}
	send(r)
	if p.Script { // the interpreter opens it by its number
		_, _ = unix.FcntlInt(executableFD, unix.F_SETFD, 0)
	}
	err = execFD(executableFD, path, append([]string{p.Path}, p.Args...), os.Environ())
	return fmt.Errorf("execute %s: %w", p.Path, err)
}

func list(all []string) string {
	s := all[0]
	for _, m := range all[1:] {
		s += ", " + m
	}
	return s
}

func send(r *Report) {
	b, _ := json.Marshal(r)
	_, _ = unix.Write(reportFD, append(b, '\n'))
}

// apply takes the steps in an order that leaves each of them allowed. Only a user
// that cannot be set is an error: the plugin must not run with more rights then.
func apply(p *Profile, r *Report, execPath uintptr) error {
	note := func(name string, err error, text string) {
		if err != nil {
			text = err.Error()
		}
		r.Measures = append(r.Measures, Measure{Name: name, Holds: err == nil, Text: text})
	}
	if p.Group != "" {
		note("cgroup", cgroup.Join(p.Group), filepath.Base(p.Group))
	}
	note("rlimits", limit(p), "no core dumps, no message queues")
	if !p.Network && !p.Disks {
		note("network", unix.Unshare(unix.CLONE_NEWNET), "a namespace without interfaces")
	}
	abi, landErr := LandlockABI()
	rules, ruleErr := openRules(p.Files)
	rules = append(rules, openRule{executableFD, Run})
	bounding := dropBounding(p.Caps)
	if p.User != nil {
		if err := become(p.User); err != nil {
			return fmt.Errorf("--plugin-user: %w", err)
		}
		note("user", nil, p.User.Name)
	}
	left, err := setCaps(p.Caps)
	if err == nil && len(left) > 0 {
		err = bounding
	}
	note("capabilities", err, capList(left))
	nnp := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	note("no_new_privs", nnp, "setuid programs give no rights")
	if !p.Disks {
		if ruleErr != nil {
			note("paths", ruleErr, "")
		}
		if landErr == nil {
			landErr = restrictFiles(abi, rules, p.Network)
		}
		note("landlock", landErr, fmt.Sprintf("ABI %d", abi))
		if landErr == nil && abi < bestABI {
			note("landlock's newer rights", fmt.Errorf("the kernel has ABI %d, not %d: %s", abi, bestABI, lacks(abi)), "")
		}
	}
	note("seccomp", restrictCalls(p, execPath), "system calls of block I/O")
	return nil
}

// lacks names the accesses that a domain of an old ABI does not refuse.
func lacks(abi int) string {
	var out []string
	for _, l := range []struct {
		since int
		what  string
	}{{3, "truncation"}, {4, "TCP"}, {5, "controls of devices"}, {6, "signals and abstract sockets"}} {
		if abi < l.since {
			out = append(out, l.what)
		}
	}
	return list(out)
}

// limit sets the limits of resources. A user without the right to lock memory gets
// it for io_uring: rings and buffers count.
func limit(p *Profile) error {
	all := []struct {
		what int
		most uint64
	}{{unix.RLIMIT_CORE, 0}, {unix.RLIMIT_MSGQUEUE, 0}, {unix.RLIMIT_RTPRIO, 0}}
	for _, l := range all {
		if err := unix.Setrlimit(l.what, &unix.Rlimit{Cur: l.most, Max: l.most}); err != nil {
			return err
		}
	}
	if p.User != nil && !slices.Contains(p.Caps, unix.CAP_IPC_LOCK) {
		_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	}
	return nil
}
