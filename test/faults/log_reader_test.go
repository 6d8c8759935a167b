package faults

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
)

// logPipe is a named pipe for the log of a daemon, with a reader that reads nothing.
type logPipe struct{ path string }

// newLogPipe makes the pipe, and its reader.
func newLogPipe(t *testing.T) (p logPipe, reader *os.File) {
	t.Helper()
	p.path = filepath.Join(t.TempDir(), "log")
	if err := unix.Mkfifo(p.path, 0o600); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(p.path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { reader.Close() })
	return p, reader
}

// prefix runs a daemon whose standard error is the pipe.
func (p logPipe) prefix() []string { return []string{"sh", "-c", `exec "$@" 2>` + p.path, "sh"} }

// fill writes to the pipe until nothing fits.
func (p logPipe) fill(t *testing.T) {
	t.Helper()
	fd, err := unix.Open(p.path, unix.O_WRONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	for _, size := range []int{4096, 1} {
		for err = nil; err == nil; _, err = unix.Write(fd, make([]byte, size)) {
		}
		if !errors.Is(err, unix.EAGAIN) {
			t.Fatal(err)
		}
	}
}

// A daemon whose log nobody reads serves, answers commands, reconnects and ends as any
// other, whether the reader stalls or is gone.
func TestLogReader(t *testing.T) {
	for name, disturb := range map[string]func(*testing.T, logPipe, *os.File){
		"gone":    func(_ *testing.T, _ logPipe, reader *os.File) { reader.Close() },
		"stalled": func(t *testing.T, p logPipe, _ *os.File) { p.fill(t) },
	} {
		t.Run(name, func(t *testing.T) {
			l := lab.New(t)
			ofServer, serverReader := newLogPipe(t)
			ofClient, clientReader := newLogPipe(t)
			s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}, Prefix: ofServer.prefix(), Extra: []string{"--crash-limit", "1000"}})
			c := l.Client(lab.ClientOptions{Prefix: ofClient.prefix()})
			d := l.Map(c, "disk.img", s, withLoss("queue:30s"))
			disturb(t, ofServer, serverReader)
			disturb(t, ofClient, clientReader)
			conn := mustDial(t, c, d.Name)
			for range 2 { // each writes lines at both ends
				if err := c.KillPlugin("nbd"); err != nil {
					t.Fatal(err)
				}
				if err := s.KillPlugin("fileio"); err != nil {
					t.Fatal(err)
				}
				conn = mustDial(t, c, d.Name)
				if _, err := conn.WriteAt(make([]byte, 4096), 0); err != nil {
					t.Fatal(err)
				}
			}
			mustUpgradeClient(t, c)
			if _, err := conn.ReadAt(make([]byte, 4096), 0); err != nil {
				t.Errorf("after an upgrade: %v", err)
			}
			if err := c.Unmap(d.Name, true); err != nil {
				t.Error(err)
			}
			if err := errors.Join(c.Stop(), s.Stop()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A reader that is back learns how many lines it has missed.
func TestLogReader_ThatIsBack(t *testing.T) {
	l := lab.New(t)
	p, reader := newLogPipe(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}, Prefix: p.prefix(), Extra: []string{"--crash-limit", "1000"}})
	reader.Close()
	first, err := s.Plugin("fileio")
	if err == nil {
		err = s.KillPlugin("fileio")
	}
	if err != nil {
		t.Fatal(err)
	}
	sdktest.Eventually(t, "the plugin runs again", func() bool {
		p, err := s.Plugin("fileio")
		return err == nil && p.Pid != 0 && p.Pid != first.Pid
	})
	again, err := os.OpenFile(p.path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	var text strings.Builder
	sdktest.Eventually(t, "the log reports lost lines", func() bool {
		_ = s.KillPlugin("fileio") // for another line
		again.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
		b := make([]byte, 1<<16)
		n, _ := again.Read(b)
		text.Write(b[:max(n, 0)])
		return strings.Contains(text.String(), "lines of the log are lost")
	})
}
