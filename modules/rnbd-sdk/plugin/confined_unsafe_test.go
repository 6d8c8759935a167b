package plugin

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
)

// readMemory reads from another process's memory.
func readMemory(pid int) error {
	var b [8]byte
	local := unix.Iovec{Base: &b[0], Len: 8}
	remote := unix.RemoteIovec{Base: uintptr(unsafe.Pointer(&secret)), Len: 8}
	_, err := unix.ProcessVMReadv(pid, []unix.Iovec{local}, []unix.RemoteIovec{remote}, 0)
	return err
}

var secret [8]byte

func pointer(p *byte) unsafe.Pointer { return unsafe.Pointer(p) }

// lacking as the first argument makes this binary a launcher on a kernel that lacks
// the things of the second, separated by commas: a filter of system calls answers in
// its place.
const lacking = "launch-lacking"

var answersOfOldKernels = map[string]struct {
	call  uint32
	errno unix.Errno
}{
	"landlock":          {unix.SYS_LANDLOCK_CREATE_RULESET, unix.ENOSYS},
	"landlock at boot":  {unix.SYS_LANDLOCK_CREATE_RULESET, unix.EOPNOTSUPP},
	"landlock's domain": {unix.SYS_LANDLOCK_RESTRICT_SELF, unix.E2BIG},
	"seccomp":           {unix.SYS_SECCOMP, unix.ENOSYS},
	"namespaces":        {unix.SYS_UNSHARE, unix.EPERM},
}

func launchLacking(things string) {
	runtime.LockOSThread()
	filter := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}} // the system call's number
	for _, thing := range strings.Split(things, ",") {
		a := answersOfOldKernels[thing]
		filter = append(filter,
			unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: a.call, Jt: 0, Jf: 1},
			unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(a.errno)})
	}
	filter = append(filter, unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW})
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
	if err == nil {
		err = unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&prog)), 0, 0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "filter of a test:", err)
		os.Exit(1)
	}
	confine.Exec()
}
