package confine

import (
	"os"
	"slices"
	"strings"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/sys/unix"
)

// allowed are the system calls of the runtimes of Go and C, of block I/O and of
// sockets that are there already. What has arguments to look at is in conditions.
const allowed = `
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek
io_setup io_submit io_getevents io_pgetevents io_destroy io_cancel
open openat openat2 close close_range creat truncate ftruncate fallocate fadvise64 fsync fdatasync sync_file_range
syncfs stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getcwd
getdents getdents64 fcntl flock dup dup2 dup3 umask mkdir mkdirat unlink unlinkat rmdir rename renameat
renameat2 fchmod fchmodat utimensat sendfile splice tee vmsplice copy_file_range name_to_handle_at
mmap mprotect munmap brk mremap madvise mincore msync mlock mlock2 munlock memfd_create mbind get_mempolicy
set_mempolicy mseal membarrier rseq arch_prctl prctl
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 poll ppoll select pselect6
eventfd eventfd2 signalfd signalfd4 timerfd_create timerfd_settime timerfd_gettime pipe pipe2 inotify_init1
inotify_add_watch inotify_rm_watch
futex futex_waitv futex_wait futex_wake futex_requeue set_robust_list get_robust_list set_tid_address
sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler sched_get_priority_max
sched_get_priority_min getcpu nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
getitimer setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack restart_syscall pause
getpid getppid gettid getuid geteuid getgid getegid getgroups getresuid getresgid getpgrp getpgid getsid
getrlimit setrlimit getrusage getpriority ioprio_get sysinfo uname exit exit_group wait4 waitid capget
getrandom pidfd_open
bind listen accept accept4 getsockname getpeername getsockopt shutdown sendto recvfrom
sendmsg recvmsg sendmmsg recvmmsg`

// programCalls start, connect to and end other programs. A signal to a process outside of
// the landlock domain is refused by that (ABI 6), and one of another user by the kernel.
const programCalls = `
fork vfork execve execveat connect kill tkill tgkill pidfd_send_signal setpgid setsid chdir fchdir
chmod link symlink symlinkat linkat personality`

// answer makes the action that refuses a call with an errno.
func answer(errno unix.Errno) seccomp.Action { return seccomp.ActionErrno | seccomp.Action(errno) }

// call is a system call that passes if its arguments have these values.
type call struct {
	name string
	args map[uint32]uint64
}

// calls are the calls that pass with some arguments only. Sockets of the family
// unix are streams: a datagram socket could send to any name without connect. A
// process that keeps CAP_NET_ADMIN has descriptors of the host's network, for its
// listeners, and must not set up interfaces and tables by them.
func calls(p *Profile, execPath uintptr) []call {
	pid := uint64(os.Getpid())
	all := []call{
		{"tgkill", map[uint32]uint64{0: pid}}, {"kill", map[uint32]uint64{0: pid}}, {"tkill", map[uint32]uint64{0: pid}},
		{"rt_tgsigqueueinfo", map[uint32]uint64{0: pid}},
		{"prlimit64", map[uint32]uint64{0: 0}}, {"prlimit64", map[uint32]uint64{0: pid}},
		{"execveat", map[uint32]uint64{1: uint64(execPath)}},
	}
	for _, flags := range []uint64{0, unix.SOCK_CLOEXEC, unix.SOCK_NONBLOCK, unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK} {
		for _, kind := range []uint64{unix.SOCK_STREAM, unix.SOCK_SEQPACKET} {
			args := map[uint32]uint64{0: unix.AF_UNIX, 1: kind | flags}
			all = append(all, call{"socket", args}, call{"socketpair", args})
		}
	}
	if p.Disks { // the kernel's NBD client is driven by netlink
		all = append(all, call{"socket", map[uint32]uint64{0: unix.AF_NETLINK, 2: unix.NETLINK_GENERIC}})
	}
	if p.Network {
		for _, family := range []uint64{unix.AF_INET, unix.AF_INET6, unix.AF_NETLINK} {
			all = append(all, call{"socket", map[uint32]uint64{0: family}})
		}
	}
	if p.netAdmin() {
		for _, level := range []uint64{unix.SOL_SOCKET, unix.SOL_TCP} {
			all = append(all, call{"setsockopt", map[uint32]uint64{1: level}})
		}
		for _, request := range []uint64{unix.TCGETS, unix.TIOCINQ, unix.TIOCOUTQ, fionbio, fioclex, fionclex} {
			all = append(all, call{"ioctl", map[uint32]uint64{1: request}})
		}
	}
	return all
}

// Requests of ioctl that x/sys/unix does not have, of amd64, arm64 and riscv64.
const (
	fionbio  = 0x5421
	fionclex = 0x5450
	fioclex  = 0x5451
)

// netAdmin reports whether the process keeps CAP_NET_ADMIN for its sockets alone.
func (p *Profile) netAdmin() bool { return !p.Disks && slices.Contains(p.Caps, unix.CAP_NET_ADMIN) }

// namespaces are the flags of clone that make a namespace.
const namespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP

// conditions are calls, and new threads or processes, in the filter's terms. What
// programCalls allow has none.
func conditions(p *Profile, execPath uintptr) []seccomp.NameWithConditions {
	all := []seccomp.NameWithConditions{{Name: "clone", Conditions: []seccomp.Condition{
		{Argument: 0, Operation: seccomp.BitsSet, Value: unix.CLONE_THREAD},
	}}}
	if p.Programs {
		all[0].Conditions = []seccomp.Condition{{Argument: 0, Operation: seccomp.BitsNotSet, Value: namespaces}}
	}
	for _, c := range calls(p, execPath) {
		if p.Programs && slices.Contains(strings.Fields(programCalls), c.name) {
			continue
		}
		with := seccomp.NameWithConditions{Name: c.name}
		for arg, v := range c.args {
			with.Conditions = append(with.Conditions, seccomp.Condition{Argument: arg, Operation: seccomp.Equal, Value: v})
		}
		all = append(all, with)
	}
	return all
}

// policy returns the filter. Everything else is refused with EPERM; clone3 with
// ENOSYS, for the C library falls back to clone then, whose flags can be looked at.
func policy(p *Profile, execPath uintptr) (seccomp.Policy, error) {
	info, err := arch.GetInfo("")
	if err != nil {
		return seccomp.Policy{}, err
	}
	var names []string
	for _, n := range strings.Fields(allowed) {
		if _, ok := info.SyscallNames[n]; ok { // old calls are missing on new architectures
			names = append(names, n)
		}
	}
	if p.URing {
		names = append(names, "io_uring_enter", "io_uring_setup", "io_uring_register")
	}
	if p.Network || p.Programs {
		names = append(names, "connect")
	}
	if p.Programs {
		for _, n := range strings.Fields(programCalls) {
			if _, ok := info.SyscallNames[n]; ok && !slices.Contains(names, n) {
				names = append(names, n)
			}
		}
	}
	if p.Script && !p.Programs {
		names = append(names, "execve")
	}
	if !p.netAdmin() {
		names = append(names, "ioctl", "setsockopt")
	}
	return seccomp.Policy{
		DefaultAction: seccomp.ActionErrno, // with EPERM
		Syscalls: []seccomp.SyscallGroup{
			{Action: seccomp.ActionAllow, Names: names},
			{Action: seccomp.ActionAllow, NamesWithCondtions: conditions(p, execPath)},
			{Action: answer(unix.ENOSYS), Names: []string{"clone3"}},
		},
	}, nil
}

// restrictCalls loads the filter into the calling thread. no_new_privs is set.
func restrictCalls(p *Profile, execPath uintptr) error {
	pol, err := policy(p, execPath)
	if err != nil {
		return err
	}
	return seccomp.LoadFilter(seccomp.Filter{Policy: pol})
}
