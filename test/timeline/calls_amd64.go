package main

import "golang.org/x/sys/unix"

func init() {
	known[unix.SYS_POLL] = known[unix.SYS_PPOLL]
	known[unix.SYS_EPOLL_WAIT] = known[unix.SYS_EPOLL_PWAIT]
}
