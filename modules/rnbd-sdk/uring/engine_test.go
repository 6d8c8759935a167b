package uring

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// eachEngine runs f with either engine, on the thread that owns it.
func eachEngine(t *testing.T, cfg EngineConfig, f func(t *testing.T, e Engine)) {
	for _, name := range []string{"uring", "threads"} {
		t.Run(name, func(t *testing.T) {
			if err := Supported(); name == "uring" && err != nil {
				t.Skipf("no io_uring here: %v", err)
			}
			t.Setenv(EngineEnv, "")
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			cfg.Prefer = name
			e, err := NewEngine(cfg)
			if err != nil {
				t.Fatal(err)
			}
			if e.Name() != name {
				t.Fatalf("engine is %q", e.Name())
			}
			f(t, e)
			if err := e.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// run submits one request and returns its result.
func run(t testing.TB, e Engine, r Request) int32 {
	t.Helper()
	r.Tag = 0xabcdef0123456789
	if !e.Submit(&r) {
		t.Fatal("engine is full")
	}
	e.Flush()
	var done [2]Completion
	if n := collect(t, e, done[:], 1); n != 1 || done[0].Tag != r.Tag {
		t.Fatalf("%d completions, tag %#x", n, done[0].Tag)
	}
	return done[0].Res
}

// collect reaps until want completions are there, sleeping as a pump would.
func collect(t testing.TB, e Engine, done []Completion, want int) int {
	t.Helper()
	n := 0
	for n < want {
		got := e.Reap(done[n:])
		n += got
		if got == 0 && e.Arm() && !readable(e.FD(), 10*time.Second) {
			t.Fatalf("completion lost: %d of %d, %d in flight", n, want, e.InFlight())
		}
	}
	return n
}

func readable(fd int, d time.Duration) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for end := time.Now().Add(d); ; {
		n, err := unix.Poll(fds, int(max(0, time.Until(end).Milliseconds())))
		if err != unix.EINTR {
			return n == 1
		}
	}
}

// aligned returns page-aligned memory outside the heap.
func aligned(t testing.TB, n int) []byte {
	m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(m) })
	return m
}

func tempFile(t testing.TB, size int, flags int) int32 {
	path := filepath.Join(t.TempDir(), "disk")
	if err := os.WriteFile(path, bytes.Repeat([]byte{0xee}, size), 0o600); err != nil {
		t.Fatal(err)
	}
	return open(t, path, flags)
}

func open(t testing.TB, path string, flags int) int32 {
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
	if flags&unix.O_DIRECT != 0 && err == unix.EINVAL {
		t.Skipf("no O_DIRECT on the filesystem of %s", path)
	}
	if err != nil {
		t.Fatalf("open %s: %v", path, err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return int32(fd)
}

func fill(b []byte, v byte) []byte {
	for i := range b {
		b[i] = v
	}
	return b
}

func allAre(b []byte, v byte) bool { return bytes.Count(b, []byte{v}) == len(b) }

func TestEngine_Operations(t *testing.T) {
	const size = 64 << 10
	tests := []struct {
		name string
		req  Request // FD and Buf are filled in
		buf  int     // bytes of a buffer full of 0x55
		want int32
		data func(file []byte) bool // the file's expected contents
	}{
		{"nop", Request{Op: Nop}, 0, 0, nil},
		{"read", Request{Op: Pread, Off: 4096}, 8192, 8192, nil},
		{"read at the end is short", Request{Op: Pread, Off: size - 4096}, 8192, 4096, nil},
		{"read beyond the end has nothing", Request{Op: Pread, Off: size + 4096}, 4096, 0, nil},
		{"write", Request{Op: Pwrite, Off: 8192}, 4096, 4096,
			func(f []byte) bool {
				return allAre(f[8192:12288], 0x55) && allAre(f[:8192], 0xee) && allAre(f[12288:], 0xee)
			}},
		{"write through", Request{Op: Pwrite, Off: 0, RWFlags: unix.RWF_DSYNC}, 4096, 4096,
			func(f []byte) bool { return allAre(f[:4096], 0x55) && allAre(f[4096:], 0xee) }},
		{"write of best-effort priority", Request{Op: Pwrite, Prio: 2<<13 | 5}, 4096, 4096, nil},
		{"write of a priority that needs privilege", Request{Op: Pwrite, Prio: 1 << 13}, 4096, 4096, nil},
		{"write of a priority that does not exist", Request{Op: Pwrite, Prio: 0xffff}, 4096, 4096, nil},
		{"flush", Request{Op: Fdatasync}, 0, 0, nil},
		{"flush with metadata", Request{Op: Fsync}, 0, 0, nil},
		{"punch", Request{Op: PunchHole, Off: 4096, Len: 8192}, 0, 0,
			func(f []byte) bool { return len(f) == size && allAre(f[4096:12288], 0) && allAre(f[12288:], 0xee) }},
		{"punch keeps the size", Request{Op: PunchHole, Off: size - 4096, Len: 1 << 20}, 0, 0,
			func(f []byte) bool { return len(f) == size && allAre(f[size-4096:], 0) }},
		{"zero", Request{Op: ZeroRange, Off: 4096, Len: 8192}, 0, 0,
			func(f []byte) bool { return len(f) == size && allAre(f[4096:12288], 0) && allAre(f[12288:], 0xee) }},
		{"punch of nothing", Request{Op: PunchHole}, 0, -int32(unix.EINVAL), nil},
		{"discard of a file", Request{Op: Discard, Len: 4096}, 0, -int32(unix.ENOTTY), nil},
		{"secure erase of a file", Request{Op: SecureErase, Len: 4096}, 0, -int32(unix.ENOTTY), nil},
		{"unknown operation", Request{Op: 99}, 0, -int32(unix.EOPNOTSUPP), nil},
		{"unknown flag", Request{Op: Pread, RWFlags: 1 << 30}, 4096, -int32(unix.EOPNOTSUPP), nil},
	}
	for mode, flags := range map[string]int{"buffered": 0, "direct": unix.O_DIRECT} {
		t.Run(mode, func(t *testing.T) {
			eachEngine(t, EngineConfig{Depth: 8}, func(t *testing.T, e Engine) {
				buf := aligned(t, 8192)
				for _, tt := range tests { // no t.Run: it would change the thread
					fd := tempFile(t, size, unix.O_RDWR|flags)
					tt.req.FD, tt.req.Buf = fd, fill(buf[:tt.buf], 0x55)
					if got := run(t, e, tt.req); got != tt.want {
						t.Errorf("%s: result %d, want %d (%v)", tt.name, got, tt.want, unix.Errno(max(0, -got)))
					}
					if tt.req.Op == Pread && tt.want >= 0 && !allAre(buf[:tt.want], 0xee) {
						t.Errorf("%s: buffer is not what was read", tt.name)
					}
					if tt.data == nil {
						continue
					}
					content := make([]byte, 2*size)
					n, _ := unix.Pread(int(reopen(t, fd)), content, 0)
					if !tt.data(content[:n]) {
						t.Errorf("%s: file does not hold what was written", tt.name)
					}
				}
			})
		})
	}
}

// reopen opens the file behind fd again, buffered.
func reopen(t testing.TB, fd int32) int32 {
	return open(t, "/proc/self/fd/"+itoa(int(fd)), unix.O_RDONLY)
}

func TestEngine_ErrorsAreErrnos(t *testing.T) {
	eachEngine(t, EngineConfig{Depth: 4}, func(t *testing.T, e Engine) {
		buf := aligned(t, 4096)
		readOnly := tempFile(t, 4096, unix.O_RDONLY)
		for _, tt := range []struct {
			name string
			req  Request
			want unix.Errno
		}{
			{"closed descriptor", Request{Op: Pread, FD: -1, Buf: buf}, unix.EBADF},
			{"write to a read-only descriptor", Request{Op: Pwrite, FD: readOnly, Buf: buf}, unix.EBADF},
			{"punch of a read-only descriptor", Request{Op: PunchHole, FD: readOnly, Len: 4096}, unix.EBADF},
		} {
			if got := run(t, e, tt.req); got != -int32(tt.want) {
				t.Errorf("%s: result %d, want -%d (%v)", tt.name, got, tt.want, tt.want)
			}
		}
		direct := tempFile(t, 8192, unix.O_RDWR|unix.O_DIRECT)
		if got := run(t, e, Request{Op: Pwrite, FD: direct, Buf: buf[:100], Off: 0}); got != -int32(unix.EINVAL) {
			t.Errorf("unaligned direct write: result %d, want -EINVAL", got)
		}
	})
}

func TestEngine_FullDiskSaysENOSPC(t *testing.T) {
	dir := smallTmpfs(t)
	eachEngine(t, EngineConfig{Depth: 4}, func(t *testing.T, e Engine) {
		path := filepath.Join(dir, e.Name())
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(path)
		fd := open(t, path, unix.O_RDWR)
		buf := aligned(t, 64<<10)
		total := int32(0)
		for range 10 {
			got := run(t, e, Request{Op: Pwrite, FD: fd, Buf: buf, Off: uint64(total)})
			if got == -int32(unix.ENOSPC) {
				return
			}
			if got <= 0 {
				t.Fatalf("result %d after %d bytes, want a short write, then -ENOSPC", got, total)
			}
			total += got
		}
		t.Errorf("%d bytes fit a file system of 128 KiB", total)
	})
}

// smallTmpfs mounts a file system of 128 KiB in a namespace of this thread's
// own; it is reached by the path through the thread, and gone with it.
func smallTmpfs(t *testing.T) string {
	t.Helper()
	paths, done := make(chan string), make(chan struct{})
	t.Cleanup(func() { close(done) })
	go func() {
		runtime.LockOSThread() // never unlocked: the namespace ends with the thread
		dir := t.TempDir()
		if unix.Unshare(unix.CLONE_NEWNS|unix.CLONE_FS) != nil ||
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "") != nil ||
			unix.Mount("tmpfs", dir, "tmpfs", 0, "size=128k") != nil {
			paths <- ""
			return
		}
		paths <- "/proc/self/task/" + itoa(unix.Gettid()) + "/root" + dir
		<-done
		unix.Unmount(dir, unix.MNT_DETACH)
	}()
	dir := <-paths
	if dir == "" {
		t.Skip("needs the privilege to mount a tmpfs (CAP_SYS_ADMIN)")
	}
	return dir
}

func itoa(n int) string {
	if n < 10 {
		return string(rune('0' + n))
	}
	return itoa(n/10) + itoa(n%10)
}

func TestEngine_ManyInFlight(t *testing.T) {
	const depth, rounds, block = 32, 40, 4096
	eachEngine(t, EngineConfig{Depth: depth}, func(t *testing.T, e Engine) {
		fd := tempFile(t, depth*block, unix.O_RDWR|unix.O_DIRECT)
		buf := aligned(t, depth*block)
		slot := func(tag uint64) []byte { return buf[tag*block : (tag+1)*block] }
		free := make([]uint64, depth)
		for i := range free {
			free[i] = uint64(i)
		}
		version := make([]byte, depth)
		sent, got := 0, 0
		done := make([]Completion, 5)
		for got < depth*rounds {
			for len(free) > 0 && sent < depth*rounds {
				tag := free[len(free)-1]
				version[tag]++
				fill(slot(tag), version[tag])
				if !e.Submit(&Request{Op: Pwrite, FD: fd, Buf: slot(tag), Off: tag * block, Tag: tag}) {
					version[tag]--
					break
				}
				free, sent = free[:len(free)-1], sent+1
			}
			if e.InFlight() != sent-got {
				t.Fatalf("in flight %d, want %d", e.InFlight(), sent-got)
			}
			e.Flush()
			n := collect(t, e, done[:1], 1)
			n += e.Reap(done[1:])
			for _, c := range done[:n] {
				if c.Res != block {
					t.Fatalf("result %d", c.Res)
				}
				free = append(free, c.Tag)
			}
			got += n
		}
		for tag := range uint64(depth) {
			if n := run(t, e, Request{Op: Pread, FD: fd, Buf: slot(tag), Off: tag * block}); n != block || !allAre(slot(tag), version[tag]) {
				t.Errorf("block %d: %d bytes, first %d, want all %d", tag, n, slot(tag)[0], version[tag])
			}
		}
	})
}

func TestEngine_FullAtDepth(t *testing.T) {
	eachEngine(t, EngineConfig{Depth: 3}, func(t *testing.T, e Engine) { // rounded up to 4
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		for tag := range 4 {
			op := []Op{Nop, Discard}[tag%2] // both paths count together
			if !e.Submit(&Request{Op: op, FD: int32(p[0]), Tag: uint64(tag)}) {
				t.Fatalf("request %d of 4 refused", tag)
			}
		}
		if e.Submit(&Request{Op: Nop}) || e.Submit(&Request{Op: Discard}) || e.InFlight() != 4 {
			t.Fatal("a fifth request fits")
		}
		done := make([]Completion, 8)
		collect(t, e, done, 4)
		if e.InFlight() != 0 || !e.Submit(&Request{Op: Nop}) {
			t.Fatal("no room after everything was reaped")
		}
		unix.Close(p[0])
		unix.Close(p[1])
	})
}

func TestEngine_SleepsUntilCompletion(t *testing.T) {
	eachEngine(t, EngineConfig{Depth: 4}, func(t *testing.T, e Engine) {
		if !e.Arm() || readable(e.FD(), 20*time.Millisecond) {
			t.Fatal("an idle engine does not let its owner sleep")
		}
		// A discard of a file runs on a thread in either engine.
		fd := tempFile(t, 4096, unix.O_RDWR)
		for _, op := range []Op{Fsync, Discard, Nop} {
			e.Submit(&Request{Op: op, FD: fd})
			e.Flush()
			collect(t, e, make([]Completion, 1), 1)
			if !fallsAsleep(e) {
				t.Errorf("operation %d: awake after its completion was reaped", op)
			}
		}
	})
}

// fallsAsleep reports whether the owner of an idle engine falls asleep. A worker that
// was slow to kick may wake it once more.
func fallsAsleep(e Engine) bool {
	for range 3 {
		if e.Arm() && !readable(e.FD(), 20*time.Millisecond) {
			return true
		}
	}
	return false
}

func TestEngine_CloseWaitsForRequests(t *testing.T) {
	eachEngine(t, EngineConfig{Depth: 16}, func(t *testing.T, e Engine) {
		fd := tempFile(t, 1<<20, unix.O_RDWR|unix.O_DIRECT)
		buf := aligned(t, 1<<20)
		fill(buf, 0x77)
		for i := range uint64(16) {
			e.Submit(&Request{Op: Pwrite, FD: fd, Buf: buf[i<<16 : (i+1)<<16], Off: i << 16})
		}
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
		fill(buf, 0x88) // ours again
		got := make([]byte, 1<<20)
		if n, _ := unix.Pread(int(reopen(t, fd)), got, 0); n != 1<<20 || !allAre(got, 0x77) {
			t.Error("Close returned before the writes were done")
		}
	})
}

func TestEngine_AllocatesNothing(t *testing.T) {
	eachEngine(t, EngineConfig{Depth: 16, Threads: 2}, func(t *testing.T, e Engine) {
		fd := tempFile(t, 1<<16, unix.O_RDWR)
		buf := aligned(t, 4096)
		done := make([]Completion, 16)
		r := Request{FD: fd, Buf: buf, Len: 4096}
		round := func() {
			for _, op := range []Op{Pread, Pwrite, Fdatasync, PunchHole, ZeroRange, Nop, Discard} {
				r.Op = op
				e.Submit(&r)
			}
			e.Flush()
			for n := 0; n < 7; n += e.Reap(done) {
				e.Arm()
				runtime.Gosched()
			}
		}
		round()
		if n := testing.AllocsPerRun(50, round); n != 0 {
			t.Errorf("%v allocations per round, want 0", n)
		}
	})
}

func TestNewEngine_Preference(t *testing.T) {
	uring := "threads"
	if Supported() == nil {
		uring = "uring"
	}
	for _, tt := range []struct{ name, env, prefer, want string }{
		{"nothing said", "", "", uring},
		{"auto", "", "auto", uring},
		{"threads asked", "", "threads", "threads"},
		{"environment overrides", "threads", "uring", "threads"},
		{"nonsense", "", "libaio", ""},
		{"nonsense in the environment", "libaio", "threads", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(EngineEnv, tt.env)
			e, err := NewEngine(EngineConfig{Depth: 1, Prefer: tt.prefer})
			if tt.want == "" {
				if err == nil || !strings.Contains(err.Error(), `"libaio"`) {
					t.Fatalf("err = %v, want one that names libaio", err)
				}
				return
			}
			if err != nil || e.Name() != tt.want {
				t.Fatalf("engine %v, err %v, want %s", e, err, tt.want)
			}
			if err := errors.Join(e.Close(), e.Close()); err != nil {
				t.Errorf("closed twice: %v", err)
			}
		})
	}
	if _, err := NewEngine(EngineConfig{Depth: -1}); err == nil {
		t.Error("negative depth accepted")
	}
	if _, err := NewEngine(EngineConfig{Depth: maxDepth + 1}); err == nil {
		t.Error("depth beyond the maximum accepted")
	}
}
