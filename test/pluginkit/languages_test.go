package pluginkit

import (
	"bytes"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/test/lab"
)

// TestPythonPluginPasses judges examples/io-python.
func TestPythonPluginPasses(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute; make check runs it")
	}
	if out, err := exec.Command("/usr/bin/python3", "-c", "import grpc").CombinedOutput(); err != nil {
		t.Skipf("examples/io-python needs python3-grpcio, which is not installed: %v: %s", err, out)
	}
	left := 0
	for _, r := range judge(t, filepath.Join(lab.Root(), "examples/io-python/io-python"), "--quick") {
		switch r.Outcome {
		case "failed":
			t.Errorf("%s: %s", r.Check, r.Reason)
		case "skipped":
			left++
		}
	}
	if mayMount() && left > 18 {
		t.Errorf("%d checks are left out", left)
	}
}

// TestHeaderForC runs a ring of this process against a program in C with rnbd-plugin.h.
func TestHeaderForC(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("examples/io-c needs a C compiler, and there is no cc")
	}
	exe := filepath.Join(t.TempDir(), "ring-memory")
	source := filepath.Join(lab.Root(), "examples/io-c/ring-memory.c")
	if out, err := exec.Command(cc, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-o", exe, source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	const entries, size, block = 64, 1 << 20, 4096
	ring, err := shm.NewRing(entries)
	if err != nil {
		t.Fatal(err)
	}
	defer ring.Close()
	arena, err := shm.NewArena("c", size)
	if err != nil {
		t.Fatal(err)
	}
	defer arena.Close()
	host, peer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	c := exec.Command(exe)
	mem, sq, cq := ring.FDs()
	c.ExtraFiles = []*os.File{host, duplicate(t, mem), duplicate(t, sq), duplicate(t, cq), duplicate(t, arena.FD())}
	c.Stderr = os.Stderr
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	t.Cleanup(func() { _ = c.Process.Kill() })
	_ = host.Close()

	random := rand.New(rand.NewPCG(1, 2))
	disk, s := make([]byte, size), ring.Submitter()
	for round := range 2000 {
		n := 1 + random.IntN(32)
		want := map[uint64][]byte{}
		for i := range n {
			e := shm.SQE{Tag: uint64(round*100 + i), Op: blk.Op(random.IntN(2)), Arena: 1, Device: 1, Len: block,
				Offset: uint64(i*8+random.IntN(8)) * block, ArenaOff: uint64(i) * block}
			buf := arena.Bytes()[e.ArenaOff:][:block]
			if e.Op == blk.Write {
				for j := range buf {
					buf[j] = byte(random.Uint32())
				}
				copy(disk[e.Offset:], buf)
			}
			want[e.Tag] = disk[e.Offset:][:block]
			if !s.Push(&e) {
				t.Fatal(s.Err())
			}
		}
		s.Publish()
		for _, a := range popAll(t, s, n) {
			at := int(a.Tag-uint64(round*100)) * block
			if a.Errno != 0 || !bytes.Equal(arena.Bytes()[at:][:block], want[a.Tag]) {
				t.Fatalf("tag %d: errno %d, or other bytes than were written", a.Tag, a.Errno)
			}
		}
	}
	for _, bad := range []struct {
		e    shm.SQE
		want blk.Errno
	}{
		{shm.SQE{Op: 77, Len: block}, blk.EOPNOTSUPP}, {shm.SQE{Op: blk.Discard, Len: block}, blk.EOPNOTSUPP}, {shm.SQE{Offset: 1, Len: block}, blk.EINVAL},
		{shm.SQE{Offset: size, Len: block}, blk.EIO}, {shm.SQE{ArenaOff: size, Len: block}, blk.EINVAL}, {shm.SQE{Flags: 8, Len: block}, blk.EINVAL},
	} {
		if !s.Push(&bad.e) {
			t.Fatal(s.Err())
		}
		s.Publish()
		if got := blk.Errno(popAll(t, s, 1)[0].Errno); got != bad.want {
			t.Errorf("%+v: %v, want %v", bad.e, got, bad.want)
		}
	}
	_ = peer.Close() // the end of file on descriptor 3
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("the program in C: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the program in C has not ended")
	}
}

func popAll(t *testing.T, s *shm.Submitter, n int) (all []shm.CQE) {
	t.Helper()
	var cqes [64]shm.CQE
	for start := time.Now(); len(all) < n; {
		got := s.Pop(cqes[:])
		all = append(all, cqes[:got]...)
		if time.Since(start) > 20*time.Second || s.Err() != nil {
			t.Fatalf("%d of %d answers: %v", len(all), n, s.Err())
		}
		if got == 0 && s.Arm() {
			_, _ = unix.Poll([]unix.PollFd{{Fd: int32(s.FD()), Events: unix.POLLIN}}, 20000)
			s.Disarm()
		}
	}
	return all
}

func duplicate(t *testing.T, fd int) *os.File {
	t.Helper()
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(n), "shared")
	t.Cleanup(func() { _ = f.Close() })
	return f
}
