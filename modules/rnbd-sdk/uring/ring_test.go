package uring

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func newTestRing(t *testing.T, entries int, o Options) *Ring {
	t.Helper()
	if err := Supported(); err != nil {
		t.Skipf("no io_uring here: %v", err)
	}
	runtime.LockOSThread()
	r, err := NewRing(entries, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); runtime.UnlockOSThread() })
	return r
}

// Every mode is tried, since the kernel at hand only needs the first.
func TestRing_EachMode(t *testing.T) {
	newTestRing(t, 4, Options{})
	for i, mode := range modes {
		t.Run(fmt.Sprintf("%#x", mode), func(t *testing.T) {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			r, err := newRing(4, Options{CQEntries: 8}, mode)
			if errors.Is(err, unix.EINVAL) {
				t.Skip("this kernel does not know the mode")
			}
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			fd := tempFile(t, 8192, unix.O_RDWR)
			buf := aligned(t, 4096)
			for round := range uint64(20) { // around the ring
				for k := range uint64(4) {
					s := r.Next()
					s.Read(fd, buf, 4096, 0)
					s.UserData = round*4 + k
				}
				if r.Next() != nil {
					t.Fatal("a fifth entry fits")
				}
				if err := r.Wait(4); err != nil || r.Pending() != 0 {
					t.Fatalf("wait: %v, %d pending", err, r.Pending())
				}
				var seen [4]bool
				var c [8]CQE
				if n := r.Peek(c[:]); n != 4 {
					t.Fatalf("mode %d: %d completions, want 4", i, n)
				}
				for _, c := range c[:4] {
					if c.Res != 4096 || c.UserData/4 != round || seen[c.UserData%4] {
						t.Fatalf("completion %+v in round %d", c, round)
					}
					seen[c.UserData%4] = true
				}
			}
		})
	}
}

func TestRing_RegisteredFilesAndBuffers(t *testing.T) {
	r := newTestRing(t, 4, Options{})
	first, second := tempFile(t, 4096, unix.O_RDWR), tempFile(t, 4096, unix.O_RDWR)
	if err := r.RegisterFiles([]int32{first, second}); err != nil {
		t.Fatal(err)
	}
	a, b := aligned(t, 4096), aligned(t, 8192)
	if err := r.RegisterBuffers([][]byte{a, b}); err != nil {
		t.Fatal(err)
	}
	fill(b, 0x11)
	s := r.Next()
	s.WriteFixed(1, b[4096:], 0, 0, 1)
	s.Flags = FixedFile
	wait := func(want int32) {
		t.Helper()
		if err := r.Wait(1); err != nil {
			t.Fatal(err)
		}
		var c [1]CQE
		if r.Peek(c[:]) != 1 || c[0].Res != want {
			t.Fatalf("result %d, want %d", c[0].Res, want)
		}
	}
	wait(4096)
	s = r.Next()
	s.ReadFixed(1, b[:4096], 0, 0, 0) // memory of buffer 1 by the name of 0
	s.Flags = FixedFile
	wait(-int32(unix.EFAULT))
	s = r.Next()
	s.ReadFixed(second, a, 0, 0, 0)
	wait(4096)
	if !allAre(a, 0x11) {
		t.Error("index 1 was not the second file")
	}
	if err := r.RegisterBuffers([][]byte{b}); err != nil { // replaces both
		t.Fatal(err)
	}
	s = r.Next()
	s.ReadFixed(first, b[:4096], 0, 0, 0)
	wait(4096)
	if !allAre(b[:4096], 0xee) {
		t.Error("first file read wrong")
	}
}

// The buffers of the table are a driver's to fill: until then there are none.
func TestRing_ReservedBuffersAreEmpty(t *testing.T) {
	r := newTestRing(t, 4, Options{})
	file := tempFile(t, 4096, unix.O_RDWR)
	if err := r.ReserveBuffers(8); errors.Is(err, unix.EINVAL) {
		t.Skip("Linux before 5.19")
	} else if err != nil {
		t.Fatal(err)
	}
	for _, fill := range []func(*SQE){
		func(s *SQE) { s.ReadPages(file, 4096, 0, 7) },
		func(s *SQE) { s.WritePages(file, 4096, 0, 0) },
		func(s *SQE) { s.WritePages(file, 4096, 0, 8) }, // beyond the table
	} {
		fill(r.Next())
		if err := r.Wait(1); err != nil {
			t.Fatal(err)
		}
		var c [1]CQE
		if r.Peek(c[:]) != 1 || c[0].Res != -int32(unix.EFAULT) {
			t.Errorf("result %d, want EFAULT", c[0].Res)
		}
	}
	if err := r.ReserveBuffers(8); !errors.Is(err, unix.EBUSY) {
		t.Errorf("reserved twice: %v", err)
	}
}

func TestRing_DriverCommand(t *testing.T) {
	r := newTestRing(t, 4, Options{SQE128: true})
	sock, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(sock)
	if err := unix.Bind(sock, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	self, _ := unix.Getsockname(sock)
	if err := unix.Sendto(sock, []byte("seven b"), 0, self); err != nil {
		t.Fatal(err)
	}
	if !readable(sock, 10*time.Second) {
		t.Fatal("a datagram is lost on its way to its sender")
	}
	for i := range 3 { // entries of 128 bytes: the second is not behind the first half of the first
		s := r.Next()
		if len(r.Cmd(s)) != 80 {
			t.Fatalf("command area of %d bytes, want 80", len(r.Cmd(s)))
		}
		fill(r.Cmd(s)[16:], byte(i)) // ignored by this command
		const bytesWaiting = 0       // SOCKET_URING_OP_SIOCINQ
		s.URingCmd(int32(sock), bytesWaiting)
		s.UserData = uint64(i)
	}
	if err := r.Wait(3); err != nil {
		t.Fatal(err)
	}
	var c [4]CQE
	if n := r.Peek(c[:]); n != 3 {
		t.Fatalf("%d completions", n)
	}
	for i, c := range c[:3] {
		if c.Res == -int32(unix.EOPNOTSUPP) {
			t.Skip("this kernel has no commands for sockets (Linux 6.7)")
		}
		if c.Res != 7 || c.UserData != uint64(i) {
			t.Errorf("completion %d: %+v, want 7 bytes waiting", i, c)
		}
	}
}

func TestRing_BelongsToOneThread(t *testing.T) {
	r := newTestRing(t, 4, Options{})
	if r.flags&setupSingleIssuer == 0 {
		t.Skip("this kernel does not bind rings to threads")
	}
	if err := r.Run(); err != nil {
		t.Fatal(err)
	}
	errs := make(chan error)
	go func() {
		runtime.LockOSThread()
		errs <- r.Run()
	}()
	if err := <-errs; err != unix.EEXIST {
		t.Errorf("another thread: %v, want EEXIST", err)
	}
}

// An engine with a refused ring answers every request instead of hanging.
func TestEngine_RefusedRingFailsRequests(t *testing.T) {
	r := newTestRing(t, 4, Options{})
	if r.flags&setupSingleIssuer == 0 {
		t.Skip("this kernel does not bind rings to threads")
	}
	e, err := newURingEngine(EngineConfig{Depth: 4})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	e.Reap(make([]Completion, 1))
	run(t, e, Request{Op: Nop}) // bound to this thread
	type answer struct {
		n    int
		done [4]Completion
	}
	answers := make(chan answer)
	go func() {
		runtime.LockOSThread()
		var a answer
		e.Submit(&Request{Op: Nop, Tag: 1})
		e.Submit(&Request{Op: Nop, Tag: 2})
		e.Flush()
		a.n = e.Reap(a.done[:])
		answers <- a
	}()
	a := <-answers
	if a.n != 2 || a.done[0].Res != -int32(unix.EEXIST) || a.done[0].Tag+a.done[1].Tag != 3 || e.InFlight() != 0 {
		t.Errorf("%d answers %+v, %d in flight; want both failed with EEXIST", a.n, a.done, e.InFlight())
	}
	if got := run(t, e, Request{Op: Nop}); got != 0 {
		t.Errorf("the owner's next request: %d", got)
	}
}

// The test binary again, as a process with a filter that refuses io_uring.
func TestSupported_SaysWhatRefuses(t *testing.T) {
	if os.Getenv("RNBD_TEST_REFUSE") != "" {
		refuseIOUring(t, os.Getenv("RNBD_TEST_REFUSE"))
		fmt.Printf("supported: %v\n", Supported())
		e, err := NewEngine(EngineConfig{Depth: 4})
		if err != nil {
			t.Fatal(err)
		}
		fd := tempFile(t, 4096, unix.O_RDWR)
		buf := make([]byte, 4096)
		fmt.Printf("engine: %s reads %d\n", e.Name(), run(t, e, Request{Op: Pread, FD: fd, Buf: buf}))
		_, err = NewEngine(EngineConfig{Prefer: "uring"})
		fmt.Printf("uring: %v\n", err)
		return
	}
	setting, _ := os.ReadFile(disabledSetting)
	eperm := "a system-call filter"
	if s := strings.TrimSpace(string(setting)); s != "0" && s != "" {
		eperm = "sysctl kernel.io_uring_disabled is " + s
	}
	for errno, why := range map[string]string{"EPERM": eperm, "ENOSYS": "no io_uring, or a system-call filter hides it"} {
		t.Run(errno, func(t *testing.T) {
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestSupported_SaysWhatRefuses$", "-test.v")
			cmd.Env = append(os.Environ(), "RNBD_TEST_REFUSE="+errno, EngineEnv+"=")
			out, err := cmd.CombinedOutput()
			if strings.Contains(string(out), "cannot filter") {
				t.Skipf("no seccomp here: %s", out)
			}
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, want := range []string{
				"supported: io_uring_setup: ", why,
				"engine: threads reads 4096", "uring: new I/O engine: io_uring_setup: ",
			} {
				if !strings.Contains(string(out), want) {
					t.Errorf("no %q in\n%s", want, out)
				}
			}
		})
	}
}
