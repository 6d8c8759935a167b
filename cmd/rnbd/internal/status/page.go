package status

import (
	"cmp"
	"context"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Bounds of what readers get.
const (
	maxRows   = 2000        // of each list
	maxEvents = 200         // the latest ones
	maxAge    = time.Second // of an answer
	patience  = 5 * time.Second
)

// Page shows a daemon. It looks at it until Close. Its methods may be called by any
// goroutine.
type Page struct {
	daemon *Daemon
	host   string
	stop   context.CancelFunc
	looks  sync.WaitGroup

	mu          sync.Mutex
	older, last *sample // of the last two ticks; nil: none
	history     ring
	answer      []byte    // JSON, for readers
	answered    time.Time // when it was made
}

// New returns a Page of d.
func New(d *Daemon) *Page {
	ctx, stop := context.WithCancel(context.Background())
	p := &Page{daemon: d, stop: stop}
	p.host, _ = os.Hostname() // without one the page has none
	p.looks.Go(func() { p.run(ctx) })
	return p
}

// Close ends the looks at the daemon.
func (p *Page) Close() {
	p.stop()
	p.looks.Wait()
}

// run adds to the history until ctx ends.
func (p *Page) run(ctx context.Context) {
	ticks := time.NewTicker(Interval)
	defer ticks.Stop()
	for {
		p.tick(ctx)
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
	}
}

// tick adds a point to the history. A daemon that does not answer leaves a gap.
func (p *Page) tick(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	p.mu.Lock()
	defer p.mu.Unlock()
	s, err := p.daemon.look(ctx)
	if err != nil {
		return
	}
	if p.last != nil {
		p.history.add(s.point(p.last))
	}
	s.state = State{Totals: s.state.Totals} // the next point needs no more
	p.older, p.last = p.last, s
}

// values returns the JSON of the state, which is a second old at most.
func (p *Page) values() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.answer == nil || time.Since(p.answered) >= maxAge {
		b, err := json.Marshal(p.state())
		if err != nil { // there is no value that JSON does not have
			panic(err)
		}
		p.answer, p.answered = b, time.Now()
	}
	return p.answer
}

// state asks the daemon. p.mu is held.
func (p *Page) state() *State {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := p.daemon.look(ctx)
	if err != nil {
		s = &sample{time: time.Now(), state: State{Daemon: p.daemon.kind, Problem: err.Error()}}
	} else {
		s.work(cmp.Or(p.older, p.last))
	}
	st := &s.state
	st.Host, st.Time, st.Interval, st.History = p.host, s.time.UnixMilli(), Interval.Seconds(), p.history.all()
	st.Events = p.daemon.events(ctx)
	st.arrange()
	return st
}

// events returns the latest events, latest first. Without an answer there are none.
func (d *Daemon) events(ctx context.Context) []Event {
	l, err := d.api.Events(ctx, &controlpb.EventsRequest{})
	if err != nil {
		return []Event{}
	}
	list := l.Events[max(0, len(l.Events)-maxEvents):]
	out := make([]Event, 0, len(list))
	for _, e := range slices.Backward(list) {
		about := slices.DeleteFunc([]string{e.Plugin, e.Session, e.Path, e.Device}, func(s string) bool { return s == "" })
		out = append(out, Event{Number: e.Number, Time: e.TimeUnixNs / 1e6, Kind: e.Kind, About: strings.Join(about, " "),
			From: e.From, To: e.To, Why: e.Why})
	}
	return out
}

// arrange orders the lists by what a person wants to see first, and bounds them.
func (s *State) arrange() {
	slices.SortStableFunc(s.Devices, func(a, b Device) int {
		return cmp.Or(last(a.State == "open" && a.Hung == 0)-last(b.State == "open" && b.Hung == 0), cmp.Compare(b.bytes(), a.bytes()),
			cmp.Compare(len(a.Name), len(b.Name)), strings.Compare(a.Name, b.Name)) // rnbd9 before rnbd10
	})
	slices.SortStableFunc(s.Sessions, func(a, b Session) int {
		return cmp.Or(last(a.Paths == a.PathsConnected)-last(b.Paths == b.PathsConnected), strings.Compare(a.Name, b.Name))
	})
	slices.SortStableFunc(s.Paths, func(a, b Path) int {
		return cmp.Or(last(a.State == "connected")-last(b.State == "connected"), strings.Compare(a.Session, b.Session), cmp.Compare(a.ID, b.ID))
	})
	s.Devices, s.Sessions, s.Paths = atMost(s.Devices), atMost(s.Sessions), atMost(s.Paths)
	s.Plugins, s.Conditions = atMost(s.Plugins), atMost(s.Conditions)
}

// last is 1 for those that stand behind.
func last(behind bool) int {
	if behind {
		return 1
	}
	return 0
}

func (d *Device) bytes() float64 {
	if d.Read == nil {
		return 0
	}
	return *d.Read + *d.Written
}

// atMost bounds a list. An empty one is not null in JSON.
func atMost[T any](list []T) []T {
	return append([]T{}, list[:min(len(list), maxRows)]...)
}
