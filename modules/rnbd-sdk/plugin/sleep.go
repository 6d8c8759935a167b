package plugin

import "golang.org/x/sys/unix"

// yield lets others run. The call is raw: it blocks for nothing, and a thread
// that is in an announced system call whenever the runtime's monitor looks has
// its P taken away each time, which keeps the monitor busy. Being a function
// of its own, yield is a point where the runtime may stop the thread.
//
//go:noinline
func yield() {
	_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
}

// sleep waits for an eventfd and takes its token, which may be from a kick
// that the ring knows nothing of.
func sleep(fd int) {
	p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	_, _ = unix.Poll(p[:], -1) // EINTR: as good as a wake
	var token [8]byte
	_, _ = unix.Read(fd, token[:])
}
