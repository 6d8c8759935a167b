package sockpair

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestBothEndsAreConnected(t *testing.T) {
	for name, kind := range map[string]int{"stream": unix.SOCK_STREAM, "packets": unix.SOCK_SEQPACKET} {
		t.Run(name, func(t *testing.T) {
			ours, file, err := New(kind, "pair")
			if err != nil {
				t.Fatal(err)
			}
			defer ours.Close()
			if flags, err := unix.FcntlInt(file.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("a program that is started inherits the other end: %#x, %v", flags, err)
			}
			theirs, err := Conn(file)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := file.Stat(); !errors.Is(err, os.ErrClosed) {
				t.Errorf("the file is not closed: %v", err)
			}
			if _, err := ours.Write([]byte("hello")); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, 8)
			if n, err := theirs.Read(got); err != nil || string(got[:n]) != "hello" {
				t.Errorf("read %q, %v", got[:n], err)
			}
			theirs.Close()
			if n, err := ours.Read(got); n != 0 || err != nil && !errors.Is(err, io.EOF) {
				t.Errorf("after the end of the other process: %d, %v", n, err)
			}
		})
	}
}

func TestConnRefusesOtherFiles(t *testing.T) {
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Conn(f); !errors.Is(err, syscall.ENOTSOCK) {
		t.Errorf("/dev/null: %v", err)
	}
	if _, err := f.Stat(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the file is not closed: %v", err)
	}
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	f, err = udp.(*net.UDPConn).File()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Conn(f); !errors.Is(err, syscall.EPROTOTYPE) {
		t.Errorf("UDP: %v", err)
	}
}
