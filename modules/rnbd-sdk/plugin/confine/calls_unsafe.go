package confine

import (
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// createRuleset passes the part of attr that the kernel knows: zero fields that
// are newer than the kernel are accepted.
func createRuleset(attr *unix.LandlockRulesetAttr) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, uintptr(unsafe.Pointer(attr)), unsafe.Sizeof(*attr), 0)
	if errno != 0 {
		return -1, errno
	}
	return int(fd), nil
}

// pathBeneath is struct landlock_path_beneath_attr, packed: 12 bytes.
type pathBeneath struct {
	access [2]uint32
	fd     int32
}

func addPath(set, fd int, rights uint64) error {
	a := pathBeneath{fd: int32(fd)}
	*(*[8]byte)(unsafe.Pointer(&a.access)) = *(*[8]byte)(unsafe.Pointer(&rights))
	_, _, errno := unix.Syscall6(unix.SYS_LANDLOCK_ADD_RULE, uintptr(set), unix.LANDLOCK_RULE_PATH_BENEATH,
		uintptr(unsafe.Pointer(&a)), 0, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// emptyPath is the address of an empty string, for execveat. The filter of system
// calls lets execveat pass only with this address. The address is drawn at random,
// and unmapped by the exec.
func emptyPath() (uintptr, error) {
	for {
		var b [8]byte
		if _, err := unix.Getrandom(b[:], 0); err != nil {
			return 0, err
		}
		r := *(*uint64)(unsafe.Pointer(&b))
		const page, low, span = 4096, 1 << 32, 1<<46 - 1<<33
		addr := uintptr(low + r%span)
		_, _, errno := unix.Syscall6(unix.SYS_MMAP, addr&^(page-1), page, unix.PROT_READ,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE, ^uintptr(0), 0)
		switch errno {
		case 0:
			return addr, nil
		case unix.EEXIST:
		default:
			return 0, errno
		}
	}
}

// execFD executes the file behind fd. It returns only with an error.
func execFD(fd int, path uintptr, argv, env []string) error {
	args, err := syscall.SlicePtrFromStrings(argv)
	if err != nil {
		return err
	}
	vars, err := syscall.SlicePtrFromStrings(env)
	if err != nil {
		return err
	}
	for range 100 { // EAGAIN: another thread is being started or ends
		_, _, errno := unix.RawSyscall6(unix.SYS_EXECVEAT, uintptr(fd), path,
			uintptr(unsafe.Pointer(&args[0])), uintptr(unsafe.Pointer(&vars[0])), unix.AT_EMPTY_PATH, 0)
		if err = errno; errno != unix.EAGAIN {
			break
		}
	}
	runtime.KeepAlive(args)
	runtime.KeepAlive(vars)
	return err
}

// setGroups is setgroups(2) for the calling thread.
func setGroups(groups []uint32) error {
	var p unsafe.Pointer
	if len(groups) > 0 {
		p = unsafe.Pointer(&groups[0])
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(p), 0); errno != 0 {
		return errno
	}
	return nil
}
