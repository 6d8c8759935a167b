package fence

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// The test binary is also the process that dies with the lock.
const roleKey = "RNBD_TEST_FENCE"

func TestMain(m *testing.M) {
	switch os.Getenv(roleKey) {
	case "":
		os.Exit(m.Run())
	case "holds":
		holdAndHandOver()
	case "writes":
		writeForEver()
	}
}

func open(t *testing.T, path string, flags int) *os.File {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func newFile(t *testing.T) string {
	path := filepath.Join(t.TempDir(), "disk")
	open(t, path, os.O_CREATE|os.O_RDWR)
	return path
}

// held reports whether Lock is still waiting after a while.
func held(t *testing.T, f *os.File, slot uint32) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err := Lock(ctx, f, slot)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	return err != nil
}

func TestLock_OneHolderPerSlot(t *testing.T) {
	const rw, ro = os.O_RDWR, os.O_RDONLY
	for _, test := range []struct {
		name           string
		first, second  int
		slot1, slot2   uint32
		secondMustWait bool
	}{
		{"writer after writer", rw, rw, 0, 0, true},
		{"writer after reader", ro, rw, 0, 0, true},
		{"reader after writer", rw, ro, 0, 0, true},
		{"reader after reader", ro, ro, 0, 0, true},
		{"write-only after writer", rw, os.O_WRONLY, 0, 0, true},
		{"other slot", rw, rw, 0, 1, false},
		{"other slot, readers", ro, ro, 7, 6, false},
		{"last slot", rw, rw, 1<<32 - 1, 1<<32 - 1, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := newFile(t)
			a, b := open(t, path, test.first), open(t, path, test.second)
			if held(t, a, test.slot1) {
				t.Fatal("the first one waits")
			}
			if held(t, a, test.slot1) {
				t.Fatal("the holder waits for itself")
			}
			if got := held(t, b, test.slot2); got != test.secondMustWait {
				t.Fatalf("the second one waits: %v", got)
			}
			_ = a.Close()
			if held(t, b, test.slot2) {
				t.Error("waits after the holder has gone")
			}
		})
	}
}

func TestLock_DoesNotMindFlock(t *testing.T) {
	path := newFile(t)
	other, f := open(t, path, os.O_RDWR), open(t, path, os.O_RDWR)
	if err := unix.Flock(int(other.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if held(t, f, 0) {
		t.Error("a lock of flock(2) is in the way")
	}
}

func TestLock_ClosedFileIsAnError(t *testing.T) {
	f := open(t, newFile(t), os.O_RDWR)
	_ = f.Close()
	if err := Lock(context.Background(), f, 0); err == nil || !strings.Contains(err.Error(), f.Name()) {
		t.Errorf("error %v", err)
	}
}

// child starts this binary in a role, with a file and a socket as descriptors
// 3 and 4.
func child(t *testing.T, role string, f *os.File, extra ...*os.File) *exec.Cmd {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe)
	c.Env = append(os.Environ(), roleKey+"="+role)
	c.Args = append(c.Args, f.Name())
	c.ExtraFiles = extra
	c.Stderr = os.Stderr
	return c
}

// holdAndHandOver takes the lock and leaves a reference to its description in
// a socket: like the kernel's references of I/O in flight, it outlives us.
func holdAndHandOver() {
	f, err := os.OpenFile(os.Args[1], os.O_RDWR, 0)
	check(err)
	check(Lock(context.Background(), f, 3))
	check(unix.Sendmsg(3, []byte("x"), unix.UnixRights(int(f.Fd())), nil, 0))
	fmt.Println("ready")
	time.Sleep(time.Minute)
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// The lock outlives the reaped process for as long as anything refers to the
// description, and not longer.
func TestLock_OutlivesTheProcessWithItsDescription(t *testing.T) {
	path := newFile(t)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	mine, its := os.NewFile(uintptr(fds[0]), "mine"), os.NewFile(uintptr(fds[1]), "its")
	defer mine.Close()
	f := open(t, path, os.O_RDWR)
	c := child(t, "holds", f, its)
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	_ = its.Close()
	if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	_ = c.Process.Kill()
	_ = c.Wait() // reaped
	if !held(t, f, 3) {
		t.Fatal("granted while the description is in use")
	}
	granted := make(chan error, 1)
	go func() { granted <- Lock(context.Background(), f, 3) }()
	select {
	case <-granted:
		t.Fatal("granted while the description is in use")
	case <-time.After(200 * time.Millisecond):
	}
	conn, err := net.FileConn(mine)
	if err != nil {
		t.Fatal(err)
	}
	_ = mine.Close()
	_ = conn.Close() // drops the queued reference
	select {
	case err := <-granted:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Error("not granted after the last reference has gone")
	}
}

const (
	writerBlock = 64 << 10
	writerFile  = 8 << 20
	writers     = 8
)

// writeForEver has several direct writes in flight all the time, each of a
// generation of its own.
func writeForEver() {
	f, err := os.OpenFile(os.Args[1], os.O_RDWR|syscall.O_DIRECT, 0)
	if errors.Is(err, unix.EINVAL) { // the filesystem has no direct I/O
		f, err = os.OpenFile(os.Args[1], os.O_RDWR|syscall.O_DSYNC, 0)
	}
	check(err)
	check(Lock(context.Background(), f, 0))
	for w := range writers {
		go func() {
			buf, err := unix.Mmap(-1, 0, writerBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			check(err)
			for g := byte(1); ; g++ {
				for i := range buf {
					buf[i] = g
				}
				_, err := f.WriteAt(buf, int64(w+writers*(int(g)%16))*writerBlock)
				check(err)
			}
		}()
	}
	time.Sleep(50 * time.Millisecond)
	fmt.Println("ready")
	time.Sleep(time.Minute)
}

// A process that writes is killed; nothing of it reaches the file once its
// successor has the lock.
func TestLock_NoWriteOfTheDeadAfterTheGrant(t *testing.T) {
	path := newFile(t)
	if err := os.Truncate(path, writerFile); err != nil {
		t.Fatal(err)
	}
	f := open(t, path, os.O_RDWR)
	for range 5 {
		c := child(t, "writes", f)
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
			t.Fatal(err)
		}
		next := open(t, path, os.O_RDWR)
		if !held(t, next, 0) {
			t.Fatal("granted while the writer lives")
		}
		_ = c.Process.Kill()
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		err = Lock(ctx, next, 0)
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		before := contents(t, path)
		time.Sleep(100 * time.Millisecond)
		if !bytes.Equal(before, contents(t, path)) {
			t.Error("the file changed after the grant")
		}
		_ = c.Wait()
		_ = next.Close()
	}
}

func contents(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
