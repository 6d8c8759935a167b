package uring

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Supported returns nil if io_uring works here, else an error with the call
// that was refused and a remedy. The kernel is tested once per process.
func Supported() error { return supported() }

var supported = sync.OnceValue(probe)

func probe() error {
	r, err := NewRing(4, Options{})
	if err != nil {
		return fmt.Errorf("%w: %s", err, reason(err))
	}
	defer r.Close()
	known, err := r.probeOps()
	if err != nil {
		return fmt.Errorf("%w: %s", err, reason(err))
	}
	for _, op := range []uint8{opNop, opFsync, opReadFixed, opWriteFix, opFallocate, opRead, opWrite} {
		if !known[op] {
			return fmt.Errorf("io_uring of this kernel lacks operation %d", op)
		}
	}
	if err := r.Run(); err != nil {
		return fmt.Errorf("io_uring_enter: %w: %s", err, reason(err))
	}
	return nil
}

// disabledSetting is where the administrator can forbid io_uring.
const disabledSetting = "/proc/sys/kernel/io_uring_disabled"

func reason(err error) string {
	switch {
	case errors.Is(err, unix.ENOSYS):
		return "this kernel has no io_uring, or a system-call filter hides it"
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		b, _ := os.ReadFile(disabledSetting)
		if v := strings.TrimSpace(string(b)); v != "" && v != "0" {
			return "sysctl kernel.io_uring_disabled is " + v
		}
		return "a system-call filter (seccomp, container runtime) or security module refuses it"
	case errors.Is(err, unix.ENOMEM):
		return "not enough memory that may be locked (RLIMIT_MEMLOCK)"
	case errors.Is(err, unix.EINVAL):
		return "this kernel's io_uring is too old (want Linux 5.10)"
	}
	return "unexpected refusal"
}
