package main

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// isolated is the first argument of this program when go test -exec has it start a
// test binary.
const isolated = "isolated"

// isolationCommand returns the value of go test -exec; empty: test binaries start as usual.
func isolationCommand() string {
	self, err := os.Executable()
	if !*isolate || err != nil || os.Geteuid() != 0 {
		return ""
	}
	return strconv.Quote(self) + " " + isolated
}

// execIsolated runs a program in a network namespace with a loopback interface and a
// mount namespace with an empty /run, so that packages side by side do not meet on the
// fixed ports and sockets of the daemons. It does not return.
func execIsolated(argv []string) {
	runtime.LockOSThread() // namespaces are those of a thread, which Exec keeps
	if err := enterNamespaces(); err != nil {
		fmt.Fprintln(os.Stderr, "tests run in the namespaces of this machine:", err)
	}
	err := syscall.Exec(argv[0], argv, os.Environ())
	fmt.Fprintln(os.Stderr, argv[0]+":", err)
	os.Exit(1)
}

func enterNamespaces() error {
	if err := syscall.Unshare(unix.CLONE_NEWNET | unix.CLONE_NEWNS); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	if err := os.Mkdir("/run/lock", 0o1777); err != nil {
		return err
	}
	return raiseLoopback()
}

func raiseLoopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, lo)
}
