package pump

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// switches is how often the threads of this process have gone to sleep.
func switches(t *testing.T) (n int) {
	t.Helper()
	tasks, _ := filepath.Glob("/proc/self/task/*/status")
	for _, task := range tasks {
		text, err := os.ReadFile(task)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(text), "\nvoluntary_ctxt_switches:")
		line, _, _ := strings.Cut(rest, "\n")
		k, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil {
			t.Fatal(err)
		}
		n += k
	}
	return n
}

// queued is how long this process's threads have waited for a processor.
func queued() (d time.Duration) {
	tasks, _ := filepath.Glob("/proc/self/task/*/schedstat")
	for _, task := range tasks {
		text, _ := os.ReadFile(task)
		if f := strings.Fields(string(text)); len(f) > 1 {
			ns, _ := strconv.Atoi(f[1])
			d += time.Duration(ns)
		}
	}
	return d
}

// roomForPumps lets pumps park until the end of the test.
func roomForPumps(t *testing.T) {
	before, percent := runtime.GOMAXPROCS(0), debug.SetGCPercent(100)
	SetProcs(2)
	t.Cleanup(func() {
		runtime.GOMAXPROCS(before)
		debug.SetGCPercent(percent)
		procs.Store(0)
	})
}

func TestPump_DoesNotParkWhereNobodyLooksAfterIt(t *testing.T) {
	p := newPump(t, Config{Name: "crowd"})
	p.brisk = 0
	procs.Store(0) // other tests may have called it
	if p.mayPark() {
		t.Error("it parks without SetProcs")
	}
	roomForPumps(t)
	if !p.mayPark() {
		t.Error("it does not park beside idle processors")
	}
	n := procs.Load()
	pumps.Add(n)
	defer pumps.Add(-n)
	if p.mayPark() {
		t.Error("it parks among pumps that take all processors")
	}
}

// beatEvery makes a source that is woken by the kernel's clock, with nothing in
// this process that would wake it too.
func beatEvery(t *testing.T, d time.Duration) *probe {
	t.Helper()
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	at := unix.NsecToTimespec(int64(d))
	if err := unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Interval: at, Value: at}, nil); err != nil {
		t.Fatal(err)
	}
	var count [8]byte
	return &probe{fd: fd, hook: func() { // raw: an ordinary call would wake the monitor
		unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&count)), uintptr(len(count)))
	}}
}

// A pump that is woken now and then costs the process a few sleeps of threads
// each time, not the fifty of the runtime's monitor. The monitor looks at a
// thread that waits for a processor as well.
func TestPump_SeldomWokenWakesNobodyElse(t *testing.T) {
	roomForPumps(t)
	const beats = 4
	best, judged := 1<<30, 0 // of several: the runtime has work of its own at times
	for range 10 {
		p := newPump(t, Config{Name: "seldom"})
		add(t, p, beatEvery(t, 2*longSleep))
		p.Start()
		asleep(t, p)
		time.Sleep(4 * longSleep)
		wakes, before, crowd := p.Stats().Wakes, switches(t), queued()
		time.Sleep(2 * beats * longSleep)
		n, woken := switches(t)-before, int(p.Stats().Wakes-wakes)
		stopInTime(t, p)
		if woken < beats/2 || queued()-crowd > 2*time.Millisecond {
			continue
		}
		judged++
		if best = min(best, n/woken); best <= 20 {
			return
		}
	}
	if judged == 0 {
		t.Skip("the processors are too busy to tell")
	}
	t.Errorf("one wake-up of the pump made threads sleep %d times, if it woke at all", best)
}

func TestPump_ParksWhileItIsSeldomWoken(t *testing.T) {
	roomForPumps(t)
	p := newPump(t, Config{Name: "park"})
	steps := []struct {
		slept time.Duration
		times int
		parks bool
	}{
		{0, 0, false},
		{longSleep, 1, true},
		{longSleep / 2, briskAfter - 1, true},
		{longSleep, 1, true},
		{longSleep / 2, briskAfter, false},
		{longSleep / 2, briskAfter, false},
		{time.Second, 1, true},
	}
	for i, s := range steps {
		for range s.times {
			p.slept(s.slept)
		}
		if got := p.mayPark(); got != s.parks {
			t.Errorf("step %d, after %d sleeps of %v: parks: %v", i, s.times, s.slept, got)
		}
	}
}

// Whoever wakes it, and whether it blocks or parks, it wakes.
func TestPump_WakesFromEitherSleep(t *testing.T) {
	roomForPumps(t)
	const rounds = 100
	for _, brisk := range []int{0, briskAfter} {
		t.Run(fmt.Sprintf("after %d short sleeps", brisk), func(t *testing.T) {
			p := newPump(t, Config{Name: "either", Spin: -1})
			s := newProbe(t)
			add(t, p, s)
			p.Start()
			parked := 0
			for i := range rounds {
				p.Call(func() { p.brisk = brisk })
				asleep(t, p)
				p.owner.Lock()
				if p.parked {
					parked++
				}
				p.owner.Unlock()
				before := s.polls.Load()
				switch i % 3 {
				case 0:
					signal(s.fd) // is never read
				case 1:
					p.Do(func() {})
				case 2:
					for !p.TryDrive(func() { signal(s.fd) }) {
						asleep(t, p) // a trace of the last wake-up may have woken it once more
					}
				}
				for end := time.Now().Add(5 * time.Second); s.polls.Load() == before; time.Sleep(20 * time.Microsecond) {
					if time.Now().After(end) {
						t.Fatalf("round %d: it sleeps on", i)
					}
				}
			}
			if often := parked > rounds/2; often != (brisk < briskAfter) {
				t.Errorf("it was parked in %d of %d rounds", parked, rounds)
			}
		})
	}
}
