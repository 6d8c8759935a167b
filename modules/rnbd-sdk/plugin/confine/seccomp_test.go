package confine

import (
	"encoding/binary"
	"os"
	"strings"
	"testing"

	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// verdict runs the filter of a profile on a call.
func verdict(t *testing.T, p *Profile, name string, args ...uint64) (passes bool, errno unix.Errno) {
	t.Helper()
	info, err := arch.GetInfo("")
	if err != nil {
		t.Fatal(err)
	}
	nr, ok := info.SyscallNames[name]
	if !ok {
		t.Skipf("no call %s on this architecture", name)
	}
	return runFilter(t, p, uint32(nr), uint32(info.ID), args...)
}

var filters = map[*Profile]*bpf.VM{}

func filterOf(t *testing.T, p *Profile) *bpf.VM {
	t.Helper()
	if vm := filters[p]; vm != nil {
		return vm
	}
	pol, err := policy(p, testExecPath)
	if err != nil {
		t.Fatal(err)
	}
	program, err := pol.Assemble()
	if err != nil {
		t.Fatal(err)
	}
	if filters[p], err = bpf.NewVM(program); err != nil {
		t.Fatal(err)
	}
	return filters[p]
}

// runFilter passes struct seccomp_data to the filter. Its words have the byte order of
// the machine, which a kernel's filter loads as they are and bpf.VM as big-endian.
func runFilter(t *testing.T, p *Profile, nr, id uint32, args ...uint64) (passes bool, errno unix.Errno) {
	t.Helper()
	vm := filterOf(t, p)
	data := make([]byte, 64)
	binary.BigEndian.PutUint32(data, nr)
	binary.BigEndian.PutUint32(data[4:], id)
	for i, a := range args {
		binary.BigEndian.PutUint32(data[16+8*i:], uint32(a))
		binary.BigEndian.PutUint32(data[20+8*i:], uint32(a>>32))
	}
	out, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	const allow, errnoAction = 0x7fff0000, 0x00050000
	switch uint32(out) &^ 0xffff {
	case allow:
		return true, 0
	case errnoAction:
		return false, unix.Errno(out & 0xffff)
	}
	t.Fatalf("action %#x", out)
	return false, 0
}

const testExecPath = 0x123456789abc

func TestCallsThatPass(t *testing.T) {
	storage := &Profile{URing: true, Caps: []int{unix.CAP_DAC_OVERRIDE}}
	front := &Profile{Caps: []int{unix.CAP_IPC_LOCK, unix.CAP_NET_ADMIN}}
	disks := &Profile{Disks: true, URing: true, Caps: []int{unix.CAP_NET_ADMIN, unix.CAP_SYS_ADMIN}}
	network := &Profile{Network: true}
	script := &Profile{Script: true}
	programs := &Profile{Programs: true, URing: true, Caps: []int{unix.CAP_DAC_OVERRIDE}}
	all := map[string]*Profile{"programs": programs, "storage": storage, "front end": front, "disks": disks, "network": network, "script": script}
	pid := uint64(os.Getpid())
	const high = 1 << 32
	type args = []uint64
	for _, c := range []struct {
		name string
		args args
		pass string // profiles, or all; empty: none
	}{
		{"read", nil, "all"}, {"io_uring_setup", nil, "storage disks programs"}, {"futex", nil, "all"}, {"pwritev2", nil, "all"},
		{"clone", args{unix.CLONE_THREAD | unix.CLONE_VM}, "all"},
		{"clone", args{uint64(unix.SIGCHLD)}, "programs"},
		{"clone", args{high | uint64(unix.SIGCHLD)}, "programs"},
		{"clone", args{unix.CLONE_NEWUSER | uint64(unix.SIGCHLD)}, ""}, {"clone", args{unix.CLONE_NEWNET | uint64(unix.SIGCHLD)}, ""},
		{"clone3", nil, ""}, {"fork", nil, "programs"}, {"vfork", nil, "programs"},
		{"execve", nil, "script programs"},
		{"execveat", args{6, testExecPath}, "all"},
		{"execveat", args{6, testExecPath + 1}, "programs"},
		{"execveat", args{6, testExecPath & 0xffffffff}, "programs"},
		{"kill", args{pid}, "all"}, {"kill", args{1}, "programs"}, {"kill", args{^uint64(0)}, "programs"},
		{"tgkill", args{pid}, "all"}, {"tgkill", args{pid + 1}, "programs"},
		{"prlimit64", args{0}, "all"}, {"prlimit64", args{pid}, "all"}, {"prlimit64", args{pid + 1}, ""},
		{"ptrace", nil, ""}, {"process_vm_readv", nil, ""}, {"process_vm_writev", nil, ""}, {"pidfd_getfd", nil, ""},
		{"pidfd_send_signal", nil, "programs"}, {"process_madvise", nil, ""}, {"kcmp", nil, ""},
		{"mount", nil, ""}, {"open_by_handle_at", nil, ""}, {"unshare", nil, ""}, {"setns", nil, ""}, {"pivot_root", nil, ""},
		{"bpf", nil, ""}, {"perf_event_open", nil, ""}, {"userfaultfd", nil, ""}, {"keyctl", nil, ""}, {"init_module", nil, ""},
		{"mknod", nil, ""}, {"symlink", nil, "programs"}, {"setuid", nil, ""}, {"reboot", nil, ""}, {"iopl", nil, ""},
		{"socket", args{unix.AF_UNIX, unix.SOCK_STREAM | unix.SOCK_CLOEXEC}, "all"},
		{"socket", args{unix.AF_UNIX, unix.SOCK_DGRAM}, ""},
		{"socketpair", args{unix.AF_UNIX, unix.SOCK_SEQPACKET}, "all"},
		{"socketpair", args{unix.AF_UNIX, unix.SOCK_DGRAM}, ""},
		{"socket", args{unix.AF_INET, unix.SOCK_STREAM}, "network"},
		{"socket", args{unix.AF_PACKET, unix.SOCK_RAW}, ""},
		{"socket", args{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC}, "disks network"},
		{"socket", args{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_ROUTE}, "network"},
		{"connect", nil, "network programs"},
		{"ioctl", args{3, unix.TCGETS}, "all"},
		{"ioctl", args{3, unix.SIOCSIFFLAGS}, "storage disks network script programs"},
		{"ioctl", args{3, high | unix.SIOCSIFFLAGS}, "storage disks network script programs"},
		{"setsockopt", args{3, unix.SOL_SOCKET}, "all"},
		{"setsockopt", args{3, unix.SOL_IP}, "storage disks network script programs"},
	} {
		for name, p := range all {
			want := c.pass == "all" || c.pass != "" && strings.Contains(c.pass, name)
			passes, errno := verdict(t, p, c.name, c.args...)
			if passes != want {
				t.Errorf("%s: %s%v: passes %v", name, c.name, c.args, passes)
			}
			wantErrno := unix.EPERM
			if c.name == "clone3" {
				wantErrno = unix.ENOSYS
			}
			if !passes && errno != wantErrno {
				t.Errorf("%s: %s%v: %v", name, c.name, c.args, errno)
			}
		}
	}
}

// Calls of the other interfaces of the machine have other numbers.
func TestOtherInterfacesAreRefused(t *testing.T) {
	info, err := arch.GetInfo("")
	if err != nil {
		t.Fatal(err)
	}
	read := uint32(info.SyscallNames["read"])
	if passes, _ := runFilter(t, &Profile{}, read, uint32(info.ID)); !passes {
		t.Fatal("read does not pass")
	}
	if passes, _ := runFilter(t, &Profile{}, read, uint32(info.ID)+1); passes {
		t.Error("a call of another architecture passes")
	}
	if info.ID != arch.X86_64.ID {
		return
	}
	if passes, _ := runFilter(t, &Profile{}, read|0x40000000, uint32(info.ID)); passes {
		t.Error("a call of x32 passes")
	}
}
