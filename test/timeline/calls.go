package main

import "golang.org/x/sys/unix"

// call is what a system call is to a request.
type call uint8

const (
	otherCall call = iota
	sends
	receives
	waits // gives the CPU away or sleeps
)

// known are the system calls that matter, by number.
var known = map[int]struct {
	name string
	call call
}{
	unix.SYS_WRITE: {"write", sends}, unix.SYS_WRITEV: {"writev", sends},
	unix.SYS_SENDTO: {"sendto", sends}, unix.SYS_SENDMSG: {"sendmsg", sends},
	unix.SYS_READ: {"read", receives}, unix.SYS_READV: {"readv", receives},
	unix.SYS_RECVFROM: {"recvfrom", receives}, unix.SYS_RECVMSG: {"recvmsg", receives},
	unix.SYS_SCHED_YIELD: {"sched_yield", waits}, unix.SYS_PPOLL: {"ppoll", waits}, unix.SYS_FUTEX: {"futex", waits},
	unix.SYS_EPOLL_PWAIT: {"epoll_pwait", waits}, unix.SYS_NANOSLEEP: {"nanosleep", waits}, unix.SYS_CLOCK_NANOSLEEP: {"clock_nanosleep", waits},
}

// doorbell is the size of a write to, and a read from, an eventfd.
const doorbell = 8

// moves reports whether a call that has returned got moved payload or headers that way.
func (e *event) moves(way call) bool {
	if e.kind != exitCall || e.got <= 0 || known[e.call].call != way {
		return false
	}
	return e.got != doorbell || e.call != unix.SYS_WRITE && e.call != unix.SYS_READ
}
