package plugin

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// rig is a host with one queue and one arena.
type rig struct {
	*Process
	t    testing.TB
	ring *shm.Ring
	s    *shm.Submitter
	mem  *shm.Arena
}

const rigArena = 4

// attachT gives p a queue and an arena.
func attachT(t testing.TB, p *Process) *rig {
	t.Helper()
	ctx := testContext(t)
	ring, err := shm.NewRing(64)
	if err != nil {
		t.Fatal(err)
	}
	mem, err := shm.NewArena("test", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AttachQueue(ctx, 0, ring); err != nil {
		t.Fatal(err)
	}
	if err := p.AttachArena(ctx, rigArena, mem); err != nil {
		t.Fatal(err)
	}
	return &rig{Process: p, t: t, ring: ring, s: ring.Submitter(), mem: mem}
}

// close is for the end, when the plugin is stopped or dead.
func (r *rig) close() {
	r.t.Helper()
	if err := errors.Join(r.ring.Close(), r.mem.Close()); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) submit(es ...shm.SQE) {
	r.t.Helper()
	for _, e := range es {
		if !r.s.Push(&e) {
			r.t.Fatal("ring is full")
		}
	}
	r.s.Publish()
}

// answer waits for one.
func (r *rig) answer() shm.CQE {
	r.t.Helper()
	var c [1]shm.CQE
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if r.s.Pop(c[:]) == 1 {
			return c[0]
		}
	}
	r.t.Fatal("no answer")
	return c[0]
}

func TestProcess_RequestGoesThereAndBack(t *testing.T) {
	ctx := testContext(t)
	r := attachT(t, launchT(t, self(t, "memory")))
	limits, err := r.OpenDisk(ctx, OpenRequest{Device: 9, Name: "d"})
	if err != nil {
		t.Fatal(err)
	}
	if want := (blk.Limits{Size: 1 << 20, LogicalBlockSize: 512, MaxIOSize: 64 << 10}); limits != want {
		t.Errorf("limits %+v", limits)
	}
	copy(r.mem.Bytes(), "hello")
	r.submit(shm.SQE{Tag: 77, Op: blk.Write, Device: 9, Arena: rigArena, Len: 512, Offset: 1024})
	if c := r.answer(); c.Tag != 77 || c.Errno != 0 {
		t.Fatalf("write: %+v", c)
	}
	time.Sleep(10 * time.Millisecond) // the plugin sleeps now
	r.submit(shm.SQE{Tag: 78, Op: blk.Read, Device: 9, Arena: rigArena, ArenaOff: 4096, Len: 512, Offset: 1024})
	if c := r.answer(); c.Tag != 78 || c.Errno != 0 || string(r.mem.Bytes()[4096:][:5]) != "hello" {
		t.Fatalf("read: %+v, %q", c, r.mem.Bytes()[4096:][:5])
	}
	if err := r.Stop(ctx); err != nil || r.ExitError() != nil {
		t.Errorf("stop: %v, %v", err, r.ExitError())
	}
	r.close()
}

func TestProcess_ErrorsKeepTheirErrno(t *testing.T) {
	ctx := testContext(t)
	r := attachT(t, launchT(t, self(t, "memory")))
	small, err := shm.NewArena("small", 3*4096)
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	open := func(device uint32, name string) error {
		_, err := r.OpenDisk(ctx, OpenRequest{Device: device, Name: name})
		return err
	}
	if err := open(1, "d"); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		err  error
		want blk.Errno
	}{
		{"errno among joined errors", open(2, "busy"), blk.EBUSY},
		{"error without errno", open(2, "no errno"), blk.EIO},
		{"index in use", open(1, "d"), blk.EEXIST},
		{"index out of range", open(1<<20, "d"), blk.EINVAL},
		{"limits that make no sense", open(2, "odd"), blk.EINVAL},
		{"close of a disk that is not open", r.CloseDisk(ctx, 55), blk.ENODEV},
		{"queue attached twice", r.AttachQueue(ctx, 0, r.ring), blk.EEXIST},
		{"arena attached twice", r.AttachArena(ctx, rigArena, r.mem), blk.EEXIST},
		{"arena the plugin refuses", r.AttachArena(ctx, 8, small), blk.EMSGSIZE},
		{"arena that is not attached", r.DetachArena(ctx, 55), blk.ENOENT},
		{"front-end call to an io plugin", r.RemoveDevice(ctx, 1, true), blk.EOPNOTSUPP},
	} {
		if test.err == nil || blk.ToErrno(test.err) != test.want {
			t.Errorf("%s: %v, want %v", test.name, test.err, test.want)
			continue
		}
		if !strings.Contains(test.err.Error(), `"memory"`) {
			t.Errorf("%s: error does not name the plugin: %v", test.name, test.err)
		}
	}
	if err := r.Stop(ctx); err != nil {
		t.Error(err)
	}
	r.close()
}

func TestProcess_OpenThatTakesTooLong(t *testing.T) {
	p := launchT(t, self(t, "memory"))
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if _, err := p.OpenDisk(ctx, OpenRequest{Device: 1, Name: "slow"}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v", err)
	}
	time.Sleep(50 * time.Millisecond) // the plugin gives up as well
	if _, err := p.OpenDisk(testContext(t), OpenRequest{Device: 1, Name: "d"}); err != nil {
		t.Errorf("the index is lost: %v", err)
	}
}

func TestProcess_ResizeDisk(t *testing.T) {
	ctx := testContext(t)
	b := newMemory()
	r := attachT(t, inProcessT(t, b))
	if _, err := r.OpenDisk(ctx, OpenRequest{Device: 1, Name: "d"}); err != nil {
		t.Fatal(err)
	}
	read := shm.SQE{Op: blk.Read, Device: 1, Arena: rigArena, Len: 512, Offset: 512 << 10}
	r.submit(read)
	if c := r.answer(); c.Errno != 0 {
		t.Fatalf("read: %+v", c)
	}
	b.mu.Lock()
	b.size = 512 << 10
	b.mu.Unlock()
	if l, err := r.ResizeDisk(ctx, 1); err != nil || l.Size != 512<<10 {
		t.Fatalf("resize: %+v, %v", l, err)
	}
	r.submit(read)
	if c := r.answer(); blk.Errno(c.Errno) != blk.EIO {
		t.Fatalf("read behind the new end: %+v", c)
	}
}

// inProcessT is a plugin in this process, killed at the end of the test.
func inProcessT(t testing.TB, author any) *Process {
	t.Helper()
	kind := KindIO
	if _, ok := author.(Frontend); ok {
		kind = KindFrontend
	}
	p, err := LaunchInProcess(testContext(t), Config{Kind: kind, Logger: self(t, "x").Logger}, author)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		<-p.cleaned
	})
	return p
}

// Closing a disk, detaching its arena, draining and stopping wait for requests
// in flight; with a context that ends they fail and change nothing.
func TestProcess_WaitsForRequestsInFlight(t *testing.T) {
	for _, test := range []struct {
		name string
		call func(context.Context, *Process) error
		stop bool
	}{
		{"CloseDisk", func(ctx context.Context, p *Process) error { return p.CloseDisk(ctx, 1) }, false},
		{"DetachArena", func(ctx context.Context, p *Process) error { return p.DetachArena(ctx, rigArena) }, false},
		{"Drain", func(ctx context.Context, p *Process) error { return p.Drain(ctx) }, false},
		{"Stop", func(ctx context.Context, p *Process) error { return p.Stop(ctx) }, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := newMemory()
			b.gate = make(chan struct{})
			r := attachT(t, inProcessT(t, b))
			if _, err := r.OpenDisk(testContext(t), OpenRequest{Device: 1, Name: "d"}); err != nil {
				t.Fatal(err)
			}
			r.submit(shm.SQE{Op: blk.Read, Device: 1, Arena: rigArena, Len: 512})
			if !eventually(func() bool { return b.taken.Load() == 1 }) {
				t.Fatal("the plugin does not take the request")
			}
			if !test.stop {
				short, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
				defer cancel()
				if err := test.call(short, r.Process); !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("with a request in flight: %v", err)
				}
			}
			done := make(chan error, 1)
			var tries atomic.Int32
			ctx := testContext(t)
			go func() {
				for {
					tries.Add(1)
					err := test.call(ctx, r.Process)
					gone := errors.Is(err, syscall.ENODEV) || errors.Is(err, syscall.ENOENT)
					if !gone || ctx.Err() != nil {
						done <- err
						return
					}
					time.Sleep(time.Millisecond) // the plugin has not ended the call before
				}
			}()
			for seen := int32(-1); seen != tries.Load(); {
				seen = tries.Load()
				select {
				case err := <-done:
					t.Fatalf("did not wait: %v", err)
				case <-time.After(50 * time.Millisecond):
				}
			}
			close(b.gate)
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			if c := r.answer(); c.Errno != 0 {
				t.Errorf("answer %+v", c)
			}
			if test.name == "CloseDisk" && b.closes() != 1 {
				t.Errorf("closed %d times", b.closes())
			}
		})
	}
}

func TestProcess_StopClosesEverything(t *testing.T) {
	b := newMemory()
	r := attachT(t, inProcessT(t, b))
	for i := range uint32(3) {
		if _, err := r.OpenDisk(testContext(t), OpenRequest{Device: i, Name: "d"}); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Stop(testContext(t)); err != nil {
		t.Fatal(err)
	}
	b.arenas.Range(func(id, _ any) bool { t.Errorf("arena %v is still attached", id); return true })
	if b.closes() != 3 {
		t.Errorf("%d of 3 disks closed", b.closes())
	}
	r.close()
}

// The report of a death names the signal, if the kernel is not slow to reap.
func TestProcess_KillNamesTheSignal(t *testing.T) {
	exit := make(chan error, 1)
	c := self(t, "memory")
	c.OnExit, c.reapGrace = func(err error) { exit <- err }, 10*time.Second
	p, err := Launch(testContext(t), c)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(p.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := <-exit; !errors.Is(err, ErrExited) || !strings.Contains(err.Error(), "signal: killed") {
		t.Errorf("error %v", err)
	}
	<-p.cleaned
}

// OnExit comes within 100 ms of SIGKILL, under load. The best of some counts, since
// the kernel takes longer on a busy machine.
func TestProcess_KillUnderLoadIsNoticed(t *testing.T) {
	best := time.Hour
	defer func() {
		if best > 100*time.Millisecond {
			t.Errorf("noticed after %v at best", best)
		}
	}()
	for i := 0; i < 3 || best > 100*time.Millisecond && i < 10; i++ {
		exit := make(chan error, 2)
		c := self(t, "memory")
		c.OnExit = func(err error) { exit <- err }
		p, err := Launch(testContext(t), c)
		if err != nil {
			t.Fatal(err)
		}
		r := attachT(t, p)
		if _, err := r.OpenDisk(testContext(t), OpenRequest{Device: 1, Name: "d"}); err != nil {
			t.Fatal(err)
		}
		for i := range 2000 {
			for r.s.Space() == 0 {
				r.answer()
			}
			r.submit(shm.SQE{Op: blk.Write, Device: 1, Arena: rigArena, Len: 4096, Offset: uint64(i%200) * 4096})
		}
		if err := syscall.Kill(p.PID(), syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		err = <-exit
		best = min(best, time.Since(start))
		signal := strings.Contains(err.Error(), "signal: killed")
		if !errors.Is(err, ErrExited) || !signal && !strings.Contains(err.Error(), "not reaped yet") || !strings.Contains(err.Error(), p.Executable()) {
			t.Errorf("error %v", err)
		}
		if _, err := p.OpenDisk(testContext(t), OpenRequest{Device: 2}); !errors.Is(err, ErrExited) || blk.ToErrno(err) != blk.EIO {
			t.Errorf("call to the dead: %v", err)
		}
		<-p.cleaned
		if len(exit) != 0 {
			t.Error("OnExit came twice")
		}
		r.close()
	}
}

func TestProcess_CallInFlightFailsWhenThePluginDies(t *testing.T) {
	p := launchT(t, self(t, "memory"))
	time.AfterFunc(50*time.Millisecond, p.Kill)
	_, err := p.OpenDisk(testContext(t), OpenRequest{Name: "slow"})
	if !errors.Is(err, ErrExited) {
		t.Errorf("error %v", err)
	}
	<-p.Exited()
	if err := p.ExitError(); !strings.Contains(err.Error(), "killed by its host") {
		t.Errorf("exit error %v", err)
	}
}

func TestProcess_PanicIsQuoted(t *testing.T) {
	p := launchT(t, self(t, "memory"))
	if _, err := p.OpenDisk(testContext(t), OpenRequest{Name: "panic"}); !errors.Is(err, ErrExited) {
		t.Errorf("open: %v", err)
	}
	<-p.Exited()
	if !eventually(func() bool { return strings.Contains(p.ExitError().Error(), "panic: in open") }) {
		t.Errorf("exit error %v", p.ExitError())
	}
}

// A host that breaks the ring is not served on.
func TestProcess_ServeThatEndsEndsTheProcess(t *testing.T) {
	r := attachT(t, launchT(t, self(t, "memory")))
	mem, sq, _ := r.ring.FDs()
	if err := breakRing(mem); err != nil {
		t.Fatal(err)
	}
	if _, err := syscall.Write(sq, []byte{1, 0, 0, 0, 0, 0, 0, 0}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-r.Exited():
	case <-time.After(10 * time.Second):
		t.Fatal("lives on")
	}
	if !eventually(func() bool { return strings.Contains(r.ExitError().Error(), "broke the ring") }) {
		t.Errorf("exit error %v", r.ExitError())
	}
}

// breakRing moves the submitter's tail beyond all bounds. It is the first word
// after the geometry.
func breakRing(memFD int) error {
	_, err := syscall.Pwrite(memFD, []byte{0xff, 0xff, 0xff, 0x7f}, 128)
	return err
}

func TestProcess_StopKillsWhatDoesNotEnd(t *testing.T) {
	exit := make(chan error, 1)
	c := self(t, "deaf")
	c.OnExit = func(err error) { exit <- err }
	r := attachT(t, launchT(t, c))
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if err := r.Stop(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("stop: %v", err)
	}
	if err := <-exit; err == nil {
		t.Error("OnExit says it was orderly")
	}
	r.close()
}

// A killed process with a disk that never answers is not reaped: Stop returns
// all the same.
func TestProcess_StopGivesUpWhatIsNotReaped(t *testing.T) {
	p := inProcessT(t, newMemory())
	kill := p.kill
	p.kill = func() {}
	t.Cleanup(func() { p.kill = kill })
	over, cancel := context.WithCancel(context.Background())
	cancel()
	if err := p.Stop(over); !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "its I/O keeps it") {
		t.Errorf("stop: %v", err)
	}
}

// playHost is a host that is going to be killed.
func playHost() {
	exe, err := os.Executable()
	if err != nil {
		panic(err)
	}
	role := os.Getenv("RNBD_TEST_PLUGIN_ROLE")
	p, err := Launch(context.Background(), Config{Path: exe, Kind: KindIO, Env: roleEnv(role)})
	if err != nil {
		panic(err)
	}
	ring, err := shm.NewRing(16)
	if err != nil {
		panic(err)
	}
	if err := p.AttachQueue(context.Background(), 0, ring); err != nil {
		panic(err)
	}
	fmt.Println(p.PID())
	time.Sleep(time.Minute)
}

// A plugin ends within a second of its host, even if its queues do not.
func TestPlugin_EndsWithItsHost(t *testing.T) {
	if hostGone >= time.Second {
		t.Errorf("hostGone is %v", hostGone)
	}
	for role, least := range map[string]time.Duration{"memory": 0, "deaf": hostGone} {
		t.Run(role, func(t *testing.T) {
			exe, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			host := exec.Command(exe)
			host.Env = append(os.Environ(), roleKey+"=host", "RNBD_TEST_PLUGIN_ROLE="+role)
			out, err := host.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := host.Start(); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(out).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			pid, err := strconv.Atoi(strings.TrimSpace(line))
			if err != nil {
				t.Fatal(err)
			}
			if !alive(pid) {
				t.Fatal("the plugin does not run")
			}
			start := time.Now()
			_ = host.Process.Kill()
			for alive(pid) {
				if time.Since(start) > 10*time.Second { // the machine may be busy
					_ = syscall.Kill(pid, syscall.SIGKILL)
					t.Fatal("the plugin lives on")
				}
				time.Sleep(5 * time.Millisecond)
			}
			if took := time.Since(start); took < least {
				t.Errorf("ended after %v, without the time to close its disks", took)
			}
			_ = host.Wait()
		})
	}
}

// alive: a zombie that nobody reaps is not.
func alive(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

func openFDs(t testing.TB, pid int) int {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// eventually reports whether a condition comes true.
func eventually(ok func() bool) bool { return sdktest.Holds(sdktest.Enough, ok) }

func TestLaunch_LeaksNothing(t *testing.T) {
	socketDirs := func() int {
		all, _ := filepath.Glob(filepath.Join(os.TempDir(), "rnbd-plugin-*"))
		return len(all)
	}
	cycle := func(kill bool) {
		p, err := Launch(testContext(t), self(t, "memory"))
		if err != nil {
			t.Error(err)
			return
		}
		r := attachT(t, p)
		if _, err := p.OpenDisk(testContext(t), OpenRequest{Device: 1, Name: "d"}); err != nil {
			t.Error(err)
		}
		if kill {
			p.Kill()
			<-p.cleaned
		} else if err := p.Stop(testContext(t)); err != nil {
			t.Error(err)
		}
		r.close()
	}
	cycle(false) // the first cycle opens everything that stays open
	t.Setenv("TMPDIR", t.TempDir())
	fds, routines := openFDs(t, os.Getpid()), runtime.NumGoroutine()
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			for i := range 5 {
				cycle((g+i)%2 == 0)
			}
		})
	}
	wg.Wait()
	if !eventually(func() bool { return openFDs(t, os.Getpid()) <= fds }) {
		t.Errorf("%d descriptors open, were %d", openFDs(t, os.Getpid()), fds)
	}
	if !eventually(func() bool { return runtime.NumGoroutine() <= routines+2 }) {
		buf := make([]byte, 1<<16)
		t.Errorf("%d goroutines, were %d:\n%s", runtime.NumGoroutine(), routines, buf[:runtime.Stack(buf, true)])
	}
	if n := socketDirs(); n != 0 {
		t.Errorf("%d socket directories left", n)
	}
}

func TestPlugin_LeaksNoDescriptors(t *testing.T) {
	ctx := testContext(t)
	p := launchT(t, self(t, "memory"))
	r := attachT(t, p)
	node, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	cycle := func() {
		if _, err := p.OpenDisk(ctx, OpenRequest{Device: 1, Name: "d", File: node}); err != nil {
			t.Fatal(err)
		}
		if err := p.AttachArena(ctx, 1, r.mem); err != nil {
			t.Fatal(err)
		}
		_, _ = p.OpenDisk(ctx, OpenRequest{Device: 1, Name: "again", File: node}) // refused
		_ = p.AttachArena(ctx, 1, r.mem)                                          // refused
		_ = p.AttachQueue(ctx, 0, r.ring)                                         // refused
		if err := errors.Join(p.CloseDisk(ctx, 1), p.DetachArena(ctx, 1)); err != nil {
			t.Fatal(err)
		}
	}
	cycle()
	before := openFDs(t, p.PID())
	for range 30 {
		cycle()
	}
	if now := openFDs(t, p.PID()); now > before {
		t.Errorf("%d descriptors open, were %d", now, before)
	}
}
