package client

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

func TestAttachment_NextStep(t *testing.T) {
	for _, x := range []struct {
		name string
		in   workerInput
		want workerStep
	}{
		{"a new device is shown", workerInput{state: absent, process: otherProcess, due: true}, stepAttach},
		{"a new device waits for the next process", workerInput{state: absent}, stepRest},
		{"a new device without a process fails if none follows", workerInput{state: absent, over: true}, stepEnd},
		{"a new device that is given up before a process runs", workerInput{state: absent, want: wantGone}, stepEnd},
		{"a disk that the last daemon did not finish is taken away", workerInput{state: absent, want: wantGone, left: true}, stepLinger},

		{"a device that is shown rests", workerInput{state: shown, process: sameProcess, due: true}, stepRest},
		{"its process dies", workerInput{state: shown, due: true}, stepLose},
		{"another process runs already", workerInput{state: shown, process: otherProcess, due: true}, stepLose},
		{"it is asked to go", workerInput{state: shown, process: sameProcess, asked: true, stale: true, due: true}, stepDismiss},
		{"it has to go", workerInput{state: shown, process: sameProcess, want: wantGone, asked: true, due: true}, stepRemove},
		{"its limits have changed", workerInput{state: shown, process: sameProcess, stale: true, due: true}, stepResize},

		{"a device that is away waits for a process", workerInput{state: away, due: true, left: true}, stepRest},
		{"it waits for its own requests", workerInput{state: away, process: otherProcess, busy: true, due: true}, stepRest},
		{"it waits for its next try", workerInput{state: away, process: sameProcess}, stepRest},
		{"it is shown to the next process", workerInput{state: away, process: otherProcess, due: true, left: true}, stepAttach},
		{"it is unmapped and has a disk", workerInput{state: away, want: wantGone, left: true, busy: true}, stepLinger},
		{"it is unmapped and has none", workerInput{state: away, want: wantGone, process: otherProcess}, stepEnd},
		{"it is left to the next daemon", workerInput{state: away, want: wantLeft, left: true, process: otherProcess, due: true}, stepEnd},

		{"a process that does not let go is asked again", workerInput{state: removing, want: wantGone, process: sameProcess, due: true}, stepRemove},
		{"but not at once", workerInput{state: removing, want: wantGone, process: sameProcess}, stepRest},
		{"it dies", workerInput{state: removing, want: wantGone, left: true, due: true}, stepLose},
		{"it dies and the next one is there", workerInput{state: removing, want: wantGone, process: otherProcess}, stepLose},

		{"what lingers waits for a process", workerInput{state: lingering, want: wantGone, left: true, due: true}, stepRest},
		{"one takes it away", workerInput{state: lingering, want: wantGone, left: true, process: otherProcess, due: true, busy: true}, stepClear},
		{"one that failed tries again later", workerInput{state: lingering, want: wantGone, left: true, process: otherProcess}, stepRest},
		{"it was tried often enough", workerInput{state: lingering, want: wantGone, left: true, process: otherProcess, due: true, spent: true}, stepEnd},
		{"no process will come", workerInput{state: lingering, want: wantGone, left: true, over: true, due: true}, stepEnd},
		{"the last process takes it away", workerInput{state: lingering, want: wantGone, left: true, over: true, process: sameProcess, due: true}, stepClear},

		{"what is gone ends", workerInput{state: gone}, stepEnd},
	} {
		if got := x.in.nextStep(); got != x.want {
			t.Errorf("%s: %s, want %s", x.name, got, x.want)
		}
	}
}

// From every situation the aim is reached, or another party must act first:
// no attachment rests that could go on.
func TestAttachment_NothingIsForgotten(t *testing.T) {
	flags := []bool{false, true}
	for state := absent; state < gone; state++ {
		for want := wantShown; want <= wantLeft; want++ {
			for host := noProcess; host <= otherProcess; host++ {
				for _, left := range flags {
					for _, over := range flags {
						s := workerInput{state: state, want: want, process: host, left: left, over: over, due: true}
						step := s.nextStep()
						waits := state == absent && want == wantShown && host == noProcess && !over ||
							state == shown && want == wantShown && host == sameProcess ||
							state == away && want == wantShown && host == noProcess ||
							state == lingering && want != wantLeft && host == noProcess && !over
						if (step == stepRest) != waits && state != attaching {
							t.Errorf("%s, want %d, host %d, left %t, over %t: %s", state, want, host, left, over, step)
						}
					}
				}
			}
		}
	}
}

func TestAttachment_RefusesWrongMoves(t *testing.T) {
	for from := absent; from <= gone; from++ {
		for to := absent; to <= gone; to++ {
			allowed := false
			for _, ok := range attMoves[from] {
				allowed = allowed || ok == to
			}
			func() {
				defer func() {
					if refused := recover() != nil; refused == allowed {
						t.Errorf("from %s to %s: refused %t", from, to, refused)
					}
				}()
				a := &attachment{fe: &frontend{}, state: from, changed: make(chan struct{})}
				a.setState(to)
			}()
		}
	}
}

// A call that hangs gives its turn to others after a while.
func TestHost_Turns(t *testing.T) {
	h := &frontendProcess{callSlots: make(chan struct{}, 1)}
	if _, err := h.acquireCall(t.Context()); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	done, err := h.acquireCall(t.Context())
	if err != nil || time.Since(begun) < callTime/2 {
		t.Errorf("the next turn after %v, %v", time.Since(begun), err)
	}
	done()
	if _, err := h.acquireCall(t.Context()); err != nil {
		t.Error(err)
	}
}

// Devices that a new process hangs over keep neither it nor its other devices
// waiting, however many they are; nor the commands about others.
func TestComeback_ManyThatHang(t *testing.T) {
	t.Parallel()
	r := newComebackRig(t, turnsAtOnce+4)
	last := len(r.devs) - 1
	for _, dir := range r.dirs[:last] {
		must(t, dir.set("hold", ""))
	}
	r.kill()
	eventually(t, "the device that does not hang is back", func() bool { return r.isBack(last) })
	must(t, r.c.Unmap(t.Context(), r.devs[last].name, false))
	d, err := r.s.mapIn(r.c, "another", newFrontDir(t))
	must(t, err)
	must(t, r.c.Unmap(t.Context(), d.name, false))
	for i, dir := range r.dirs[:last] {
		if !r.f.misses(r.devs[i]) {
			t.Errorf("device %d is back, and the process hangs over it", i)
		}
		must(t, os.Remove(dir.file("hold")))
	}
	for i := range r.devs[:last] {
		eventually(t, fmt.Sprintf("device %d is back", i), func() bool { return r.isBack(i) })
	}
}

// A request of a dead process that hangs keeps its own device from the next one,
// however many processes die, and is counted until it ends.
func TestFrontend_DiesTwiceBesideARequestThatHangs(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(withTestFront(t))
	other := newFrontDir(t)
	_, err := s.mapIn(c, "other", other)
	must(t, err)
	d, dir := s.mapHanging(c, "vol")
	sources := c.sourcesLeft()
	for deaths := 1; deaths <= 2; deaths++ {
		c.killFront(t)
		eventually(t, "the other device is back", func() bool { return other.adds() == deaths+1 })
		eventually(t, "one source is left", func() bool { return c.sourcesLeft() == sources+1 })
	}
	if dir.adds() != 1 || d.inFlight() != 1 {
		t.Errorf("shown %d times, %d requests are under way", dir.adds(), d.inFlight())
	}
	s.releaseAll(blk.OK)
	eventually(t, "the device is back", func() bool { return dir.adds() == 2 })
	eventually(t, "no source is left", func() bool { return c.sourcesLeft() == sources })
}

// A size that a process does not take over holds up neither the unmap of its device,
// nor the news of the server. It is told again.
func TestFrontend_HangsOverASize(t *testing.T) {
	_, c, d, dir := mapShown(t)
	must(t, dir.set("hold-resize", ""))
	must(t, dir.set("used", ""))
	d.onResized(4096)
	resized := func() (n int) {
		for _, l := range dir.told() {
			if l == fmt.Sprint("resize ", 4096*512) {
				n++
			}
		}
		return n
	}
	eventually(t, "the front end is told the size", func() bool { return resized() == 1 })
	err := soon(t, "the unmap", async(func() error { return c.Unmap(t.Context(), d.name, false) }))
	if !errors.Is(err, syscall.EBUSY) {
		t.Errorf("unmap of a disk in use: %v", err)
	}
	eventually(t, "the front end is told again", func() bool { return resized() == 2 })
	must(t, dir.remove("used"))
	if err := soon(t, "the unmap", async(func() error { return c.Unmap(t.Context(), d.name, false) })); err != nil {
		t.Error(err)
	}
}

// The index of a device is free as soon as its front end has given it up. The
// test keeps the worker from giving the index up.
func TestUnmap_TheIndexIsFree(t *testing.T) {
	_, c, d, dir := mapShown(t)
	must(t, dir.set("hold-remove", ""))
	fe := c.frontends[0]
	removed := async(func() error { return fe.removeDevice(t.Context(), d, false) })
	eventually(t, "the front end is asked", func() bool { return slices.Contains(dir.told(), "remove forced false") })
	fe.mu.Lock()
	must(t, dir.remove("hold-remove"))
	select {
	case <-removed:
		t.Errorf("the front end has given up device %d, and still has its index", d.index)
		fe.mu.Unlock()
	case <-time.After(300 * time.Millisecond):
		fe.mu.Unlock()
		must(t, soon(t, "the removal", removed))
	}
	if !d.att.Load().isGone() {
		t.Errorf("device %d is removed, and its worker is not at its end", d.index)
	}
	must(t, c.Unmap(t.Context(), d.name, false))
}
