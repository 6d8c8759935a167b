package plugin

import (
	"os"
	"runtime"

	"golang.org/x/sys/unix"
)

// A killed process is not reaped, and keeps its descriptors, until its
// threads that wait for a disk return. Its main thread ends at once and can
// be watched alone. So a plugin's main thread does no I/O (init, below), and
// its host takes the end of that thread for the end of the process.

// pidfdThread is PIDFD_THREAD of pidfd_open(2), Linux 6.9: the descriptor is of
// the thread, not of the process.
const pidfdThread = unix.O_EXCL

func init() {
	if StartedByHost() {
		runtime.LockOSThread() // init runs on the main thread: main stays there
	}
}

// mainThreadEnd returns a channel that is closed when the main thread of pid
// ends, or nil where the kernel cannot tell. stop ends the watch.
func mainThreadEnd(pid int) (end <-chan struct{}, stop func()) {
	fd, err := unix.PidfdOpen(pid, pidfdThread|unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, func() {}
	}
	f := os.NewFile(uintptr(fd), "pidfd") // in the poller, since it does not block
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, func() {}
	}
	ended := make(chan struct{})
	go func() {
		if raw.Read(exited) == nil {
			close(ended)
		}
	}()
	return ended, func() { f.Close() }
}

// exited reports whether the thread of a pidfd has ended.
func exited(pidfd uintptr) bool {
	p := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(p, 0)
	return n == 1 && err == nil
}
