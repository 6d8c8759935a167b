package plugin

import (
	"testing"
	"time"
)

// reportingFront reports its users.
type reportingFront struct {
	*testFront
	UserEvents
}

func TestFrontend_Users(t *testing.T) {
	ctx := testContext(t)
	f := &reportingFront{testFront: newTestFront()}
	r := attachT(t, inProcessT(t, f))
	want := UserEvent{Event: UserOpens, Error: "no", Peer: "p", Listener: "l", Identity: "i", Device: "d", Mode: "ro", Reason: "r"}
	for range maxUserEvents + 3 {
		f.Add(want)
	}
	events, lost, err := r.TakeUsers(ctx)
	if err != nil || lost != 3 || len(events) != maxUserEvents {
		t.Fatalf("%d events, %d lost, error %v", len(events), lost, err)
	}
	got := events[0]
	if time.Since(got.Time) > time.Hour {
		t.Errorf("time %v", got.Time)
	}
	if got.Time = want.Time; got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if events, lost, err := r.TakeUsers(ctx); len(events) != 0 || lost != 0 || err != nil {
		t.Errorf("taken twice: %d events, %d lost, error %v", len(events), lost, err)
	}
	old := attachT(t, inProcessT(t, newTestFront()))
	if events, _, err := old.TakeUsers(ctx); len(events) != 0 || err != nil {
		t.Errorf("a plugin that reports none: %v, %v", events, err)
	}
}
