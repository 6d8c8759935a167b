package plugin

import "golang.org/x/sys/unix"

// yield calls sched_yield. The call is raw. It never blocks, and a thread in
// an announced system call loses its P each time the runtime's monitor looks.
// That keeps the monitor busy. Being a function of its own, yield is a point
// where the runtime may stop the thread.
//
//go:noinline
func yield() {
	_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
}

// sleep waits for an eventfd and takes its token. The token may be from a
// kick that the ring did not cause.
func sleep(fd int) {
	p := [1]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	_, _ = unix.Poll(p[:], -1) // EINTR: as good as a wake
	var token [8]byte
	_, _ = unix.Read(fd, token[:])
}
