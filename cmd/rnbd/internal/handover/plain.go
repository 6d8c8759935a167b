package handover

import (
	"os"

	"golang.org/x/sys/unix"
)

// A socket that listens belongs to two processes for a while, and with it its flag
// O_NONBLOCK. os.File.Fd clears that flag where the file was made of a descriptor that
// had it; an accept of the other process would block then. So files of sockets are made
// of another descriptor, which the socket replaces.

// plain makes a file of a duplicate of fd. Its method Fd changes no flag.
func plain(fd int, name string) (*os.File, error) {
	place, err := unix.Open("/", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("open", err)
	}
	f := os.NewFile(uintptr(place), name)
	if err := unix.Dup3(fd, place, unix.O_CLOEXEC); err != nil {
		f.Close()
		return nil, os.NewSyscallError("dup3", err)
	}
	return f, nil
}

// plainCopy is plain for the descriptor of a file.
func plainCopy(f *os.File) (copied *os.File, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	if cerr := raw.Control(func(fd uintptr) { copied, err = plain(int(fd), f.Name()) }); cerr != nil {
		return nil, cerr
	}
	return copied, err
}
