package syscalls

import (
	"errors"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestCallsAreCountedByName(t *testing.T) {
	c, err := Watch(os.Getpid())
	if errors.Is(err, ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	before, err := c.Read()
	if err != nil {
		t.Fatal(err)
	}
	const n = 1000
	done := make(chan bool)
	go func() { // perhaps on a new thread
		for range n {
			unix.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
			unix.Getpgid(0)
		}
		close(done)
	}()
	<-done
	after, err := c.Read()
	if err != nil {
		t.Fatal(err)
	}
	d := after.Sub(before)
	if d["sched_yield"] < n || d["sched_yield"] > n+100 { // the Go runtime yields too
		t.Errorf("%d calls of sched_yield, want about %d", d["sched_yield"], n)
	}
	if d[Others] < n*9/10 || d[Others] > 2*n { // the counting itself makes calls
		t.Errorf("%d calls of others, want about %d", d[Others], n)
	}
}

func TestProcessThatIsGone(t *testing.T) {
	start := time.Now()
	if _, err := Watch(1 << 30); err == nil {
		t.Error("a process that is not there is watched")
	} else if time.Since(start) > 10*time.Second {
		t.Error("that took", time.Since(start))
	}
}
