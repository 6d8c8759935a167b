package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/report"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func eventsVerb() *verb {
	return &verb{
		name: "events", on: onBoth, max: 2, args: "[NAME] [json]", args0: anyNames, atLength: true, run: showEvents, interrupted: "nothing was changed",
		flags: func(f *pflag.FlagSet) {
			f.BoolP("follow", "f", false, "print those that come, too, until it is interrupted")
			f.Uint64("after", 0, "print only events with a higher number")
		},
		short: "List what has changed",
		long: `List the changes of state of sessions, paths, devices, plugins and the
configuration, oldest first: the last 1,000 since the daemon started. With NAME
they are those of that session, path, device or plugin.

A line has the time, the daemon, the number of the event, its kind, what it is
about, and the state before and after with the reason. Numbers count from 1
without gaps; after a restart of the daemon they begin again. With json each
event is one object in one line, with the same keys always.`,
		example: "  rnbd events\n  rnbd client events --follow\n  rnbd events rnbd0\n  rnbd events --after 120 json",
	}
}

// eventSource is a daemon that has events.
type eventSource struct {
	daemon string
	ask    func(context.Context, *controlpb.EventsRequest, ...grpc.CallOption) (*controlpb.EventList, error)
	seen   controlpb.EventsRequest // the next question
}

func (d *daemons) eventSources() (all []*eventSource) {
	if d.client != nil {
		all = append(all, &eventSource{daemon: "client", ask: d.client.Events})
	}
	if d.server != nil {
		all = append(all, &eventSource{daemon: "server", ask: d.server.Events})
	}
	return all
}

// next returns events that were not returned before. It waits for at least one if
// wait is set, for about a minute at most.
func (s *eventSource) next(ctx context.Context, wait bool) ([]*controlpb.Event, error) {
	s.seen.WaitMs = 0
	if wait {
		s.seen.WaitMs = 60_000
	}
	list, err := s.ask(ctx, &s.seen)
	if err != nil {
		return nil, err
	}
	s.seen.Journal, s.seen.After = list.Journal, list.Last
	return list.Events, nil
}

func showEvents(c *call) error {
	format, about, err := c.eventWords()
	if err != nil {
		return err
	}
	follow, err := c.cmd.Flags().GetBool("follow")
	if err != nil {
		return err
	}
	after, err := c.cmd.Flags().GetUint64("after")
	if err != nil {
		return err
	}
	return c.with(func(ctx context.Context, d *daemons) error {
		out := &eventPrinter{w: c.cmd.OutOrStdout(), format: format, about: about, after: after}
		sources := d.eventSources()
		if err := out.printKept(ctx, sources); err != nil || !follow {
			return err
		}
		return out.follow(ctx, sources)
	})
}

// eventWords returns "table" or "json", and the name of what the events are about, ""
// for everything.
func (c *call) eventWords() (format, about string, err error) {
	format = c.Format
	for _, a := range c.args {
		switch {
		case slices.Contains(report.Formats, a):
			format = a
		case about == "":
			about = a
		default:
			return "", "", usageError{fmt.Errorf("events of %q and %q: they are those of one name", about, a)}
		}
	}
	if format == "" || format == "wide" {
		format = "table"
	}
	if format != "table" && format != "json" {
		return "", "", usageError{fmt.Errorf("events as %q: they are printed as table or json", format)}
	}
	return format, about, nil
}

// eventPrinter prints events to w.
type eventPrinter struct {
	w      io.Writer
	format string
	about  string // only events about it are printed; "": all
	after  uint64 // numbers up to it are left out
}

// daemonEvent is an event with the daemon that has it.
type daemonEvent struct {
	daemon string
	*controlpb.Event
}

// printKept prints the events that the daemons have, in the order of their times.
func (p *eventPrinter) printKept(ctx context.Context, sources []*eventSource) error {
	var all []daemonEvent
	for _, s := range sources {
		events, err := s.next(ctx, false)
		if err != nil {
			return err
		}
		for _, e := range events {
			if e.Number > p.after {
				all = append(all, daemonEvent{s.daemon, e})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b daemonEvent) int { return int(a.TimeUnixNs/1000 - b.TimeUnixNs/1000) })
	return p.print(all)
}

// follow prints the events that come.
func (p *eventPrinter) follow(ctx context.Context, sources []*eventSource) error {
	news, failed := make(chan []daemonEvent), make(chan error, len(sources))
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, s := range sources {
		go func() { failed <- s.send(ctx, news) }()
	}
	for {
		select {
		case events := <-news:
			if err := p.print(events); err != nil {
				return err
			}
		case err := <-failed:
			return err
		}
	}
}

// send sends the events that come until ctx ends or the daemon does not answer.
func (s *eventSource) send(ctx context.Context, news chan<- []daemonEvent) error {
	for {
		events, err := s.next(ctx, true)
		if err != nil {
			return fmt.Errorf("the %s daemon: %w", s.daemon, err)
		}
		var out []daemonEvent
		for _, e := range events {
			out = append(out, daemonEvent{s.daemon, e})
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case news <- out:
		}
	}
}

func (p *eventPrinter) print(events []daemonEvent) error {
	var err error
	for _, e := range events {
		if p.about != "" && !slices.Contains([]string{e.Session, e.Path, e.Device, e.Plugin}, p.about) {
			continue
		}
		if p.format == "json" {
			err = errors.Join(err, e.writeJSON(p.w))
			continue
		}
		_, werr := fmt.Fprintln(p.w, e.line())
		err = errors.Join(err, werr)
	}
	return err
}

func (e daemonEvent) time() time.Time { return time.Unix(0, e.TimeUnixNs).UTC() }

// line describes the event for people.
func (e daemonEvent) line() string {
	about := strings.Join(slices.DeleteFunc([]string{e.Plugin, e.Session, e.Path, e.Device}, func(s string) bool { return s == "" }), " ")
	words := []string{e.time().Format("2006-01-02T15:04:05.000Z"), e.daemon, fmt.Sprint(e.Number), e.Kind}
	if about != "" {
		words = append(words, about)
	}
	change := e.To
	if e.From != "" {
		change = e.From + " -> " + e.To
	}
	text := strings.Join(words, " ") + ": " + change
	if e.Why != "" {
		text += " (" + e.Why + ")"
	}
	return strings.NewReplacer("\n", " ", "\r", " ").Replace(text)
}

func (e daemonEvent) writeJSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return enc.Encode(struct {
		Time    string `json:"time"`
		Daemon  string `json:"daemon"`
		Number  uint64 `json:"number"`
		Kind    string `json:"kind"`
		Session string `json:"session"`
		Path    string `json:"path"`
		Device  string `json:"device"`
		Plugin  string `json:"plugin"`
		From    string `json:"from"`
		To      string `json:"to"`
		Why     string `json:"why"`
	}{e.time().Format(time.RFC3339Nano), e.daemon, e.Number, e.Kind, e.Session, e.Path, e.Device, e.Plugin, e.From, e.To, e.Why})
}
