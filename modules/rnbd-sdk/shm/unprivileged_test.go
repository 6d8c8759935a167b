package shm

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// runUnprivileged runs f with a limit on locked memory, on a thread that has
// lost CAP_IPC_LOCK and is thrown away. False: that is not possible here.
func runUnprivileged(t *testing.T, memlock uint64, f func() error) bool {
	t.Helper()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	if unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: min(memlock, old.Max), Max: old.Max}) != nil || old.Max < memlock {
		return false
	}
	defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)
	errs := make(chan error)
	dropped := true
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends here
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if unix.Capset(&hdr, &none[0]) != nil {
			dropped = false
			errs <- nil
			return
		}
		errs <- f()
	}()
	if err := <-errs; err != nil {
		t.Error(err)
	}
	return dropped
}
