package journal

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func numbers(events []Event) (out []uint64) {
	for _, e := range events {
		out = append(out, e.Number)
	}
	return out
}

func TestJournal_KeepsTheLast(t *testing.T) {
	j := New(3)
	if got := j.After(0); got != nil || j.Last() != 0 {
		t.Errorf("a new journal has %v", got)
	}
	for i := range 5 {
		j.Add(Event{Kind: Device, Device: fmt.Sprint("rnbd", i)})
	}
	for _, tt := range []struct {
		after uint64
		want  []uint64
	}{
		{0, []uint64{3, 4, 5}}, // 1 and 2 are not kept
		{2, []uint64{3, 4, 5}},
		{3, []uint64{4, 5}},
		{5, nil},
		{6, []uint64{3, 4, 5}}, // of another journal
		{^uint64(0), []uint64{3, 4, 5}},
	} {
		if got := numbers(j.After(tt.after)); !slices.Equal(got, tt.want) {
			t.Errorf("after %d: %v, want %v", tt.after, got, tt.want)
		}
	}
	if e := j.After(4)[0]; e.Device != "rnbd4" || e.Time.IsZero() {
		t.Errorf("event 5 is %+v", e)
	}
}

func TestJournal_AwaitWaitsForTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := New(8)
		got := make(chan []Event)
		go func() { got <- j.Await(t.Context(), 0) }()
		synctest.Wait()
		j.Add(Event{To: "open"})
		if events := <-got; len(events) != 1 || events[0].To != "open" {
			t.Errorf("%+v", events)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if events := j.Await(ctx, 1); events != nil {
			t.Errorf("%+v without one", events)
		}
	})
}

func TestJournal_NilTakesNone(t *testing.T) {
	var j *Journal
	j.Add(Event{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if j.Last() != 0 || j.After(0) != nil || j.Await(ctx, 0) != nil {
		t.Error("a nil journal has events")
	}
}

// Every reader gets each number once and in order, while others write.
func TestJournal_ReadersBesideWriters(t *testing.T) {
	const writers, each = 4, 200
	j := New(writers * each)
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range each {
				j.Add(Event{})
			}
		})
	}
	for range 2 {
		wg.Go(func() {
			for seen := uint64(0); seen < writers*each; {
				for _, e := range j.Await(t.Context(), seen) {
					if seen++; e.Number != seen {
						t.Errorf("event %d where %d was expected", e.Number, seen)
						return
					}
				}
			}
		})
	}
	wg.Wait()
}

// Sessions whose paths are lost again and again leave room for the other events, and
// the journal has the state that they have now.
func TestRepeatedEventsLeaveRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := New(DefaultSize)
		j.Add(Event{Kind: Config, To: "read again"})
		for i := range 300 { // attempts to connect five sessions, once a second
			for s := range 5 {
				j.Add(Event{Kind: Path, Session: fmt.Sprint(s), Path: "p", From: "connecting", To: fmt.Sprint("attempt ", i)})
			}
			time.Sleep(time.Second)
		}
		for s := range 5 {
			j.Add(Event{Kind: Path, Session: fmt.Sprint(s), Path: "p", From: "connecting", To: "connected"})
		}
		time.Sleep(2 * limits.Window)
		synctest.Wait()
		last, n := map[string]string{}, 0
		for _, e := range j.After(0) {
			last[e.Session] = e.To
			n++
		}
		if n > 5*40 || last[""] != "read again" {
			t.Errorf("%d events, the other is %q", n, last[""])
		}
		for s := range 5 {
			if last[fmt.Sprint(s)] != "connected" {
				t.Errorf("session %d: %s", s, last[fmt.Sprint(s)])
			}
		}
		time.Sleep(time.Hour) // no timer is left
	})
}
