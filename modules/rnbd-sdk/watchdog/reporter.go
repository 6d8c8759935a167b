package watchdog

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
)

// Hung is a group of requests that are older than the limit: those of one
// device in one stage, and on one path where the stage has one.
type Hung struct {
	Device  string
	Stage   Stage
	Session string
	Path    string // empty: none
	// Requests is their number. Oldest is the age of the oldest one, whose
	// operation and offset follow.
	Requests int
	Oldest   time.Duration
	Op       string
	Offset   uint64
}

// Merge adds h to the group of the same device, stage, session and path.
func Merge(all []Hung, h Hung) []Hung {
	for i := range all {
		o := &all[i]
		if o.key() != h.key() {
			continue
		}
		o.Requests += h.Requests
		if h.Oldest > o.Oldest {
			o.Oldest, o.Op, o.Offset = h.Oldest, h.Op, h.Offset
		}
		return all
	}
	return append(all, h)
}

type key struct {
	device  string
	stage   Stage
	session string
	path    string
}

func (h *Hung) key() key { return key{h.Device, h.Stage, h.Session, h.Path} }

const (
	// remindAfter is the pause between two warnings about a group.
	remindAfter = 10 * time.Minute
	// calm is the time without hung requests after which a group has ended. A
	// slow disk makes requests hang again and again.
	calm = 10 * time.Second
	// MaxGroups bounds the groups of one look. Further ones are left out.
	MaxGroups = 256
)

// Run calls look at intervals of Pause until done is closed. look reports whether
// the daemon has requests, or has had some that failed or hung.
func Run(done <-chan struct{}, limit time.Duration, look func(now time.Time) (busy bool)) {
	due := time.NewTimer(Pause(false, limit))
	defer due.Stop()
	for {
		select {
		case <-done:
			return
		case now := <-due.C:
			due.Reset(Pause(look(now), limit))
		}
	}
}

// Pause returns the time from one look to the next. A daemon without requests is
// woken less often than one with some, unless it would find what hangs too late:
// limit is the age from which a request hangs.
func Pause(busy bool, limit time.Duration) time.Duration {
	if busy || limit < pauseIdle {
		return pause
	}
	return pauseIdle
}

const (
	pause     = time.Second
	pauseIdle = 4 * time.Second
)

// group is what the Reporter remembers of a group.
type group struct {
	since, seen, warned time.Time
}

// Config is the configuration of a Reporter.
type Config struct {
	Log   *slog.Logger
	Limit time.Duration // age from which a request hangs
	// Journal takes an event when requests of a device begin and end to hang, and when
	// some have failed; nil: none does.
	Journal *journal.Journal
}

// Reporter logs what hangs and fails, a bounded number of times, and keeps
// what hangs now. All methods may be called from any goroutine.
type Reporter struct {
	cfg Config

	mu     sync.Mutex
	now    []Hung // of the last look
	groups map[key]*group
	quiet  map[string]*pace // by device, of failures
}

// NewReporter returns a Reporter that knows of nothing.
func NewReporter(cfg Config) *Reporter {
	return &Reporter{cfg: cfg, groups: map[key]*group{}, quiet: map[string]*pace{}}
}

// Look takes over the groups that one look has found, at the time now.
func (r *Reporter) Look(found []Hung, now time.Time) {
	slices.SortFunc(found, func(a, b Hung) int { return cmp.Compare(b.Oldest, a.Oldest) })
	found = found[:min(len(found), MaxGroups)]
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now = found
	for _, h := range found {
		r.hangs(h, now)
	}
	for k, g := range r.groups {
		if now.Sub(g.seen) >= calm {
			delete(r.groups, k)
			r.ended(k, g, now)
		}
	}
}

// hangs warns about a group that is new, or that was warned of long ago.
func (r *Reporter) hangs(h Hung, now time.Time) {
	g := r.groups[h.key()]
	fresh := g == nil
	if fresh {
		g = &group{since: now}
		r.groups[h.key()] = g
	}
	g.seen = now
	if !fresh && now.Sub(g.warned) < remindAfter {
		return
	}
	g.warned = now
	r.cfg.Log.Warn("requests hang", "device", h.Device, "requests", h.Requests, "older_than", r.cfg.Limit.String(),
		"stage", h.Stage.String(), "path", h.Path, "session", h.Session, "oldest", h.Oldest.Round(time.Second).String(), "op", h.Op, "offset", h.Offset)
	if fresh {
		r.cfg.Journal.Add(journal.Event{
			Kind: journal.Device, Session: h.Session, Device: h.Device, To: "requests hang",
			Why: strings.TrimSpace(fmt.Sprintf("%d older than %s, stage %s %s", h.Requests, r.cfg.Limit, h.Stage, h.Path)),
		})
	}
}

func (r *Reporter) ended(k key, g *group, now time.Time) {
	r.cfg.Log.Info("requests do not hang any more", "device", k.device, "stage", k.stage.String(), "path", k.path, "session", k.session,
		"after", now.Sub(g.since).Round(time.Second).String())
	r.cfg.Journal.Add(journal.Event{
		Kind: journal.Device, Session: k.session, Device: k.device, From: "requests hang", To: "requests answered",
		Why: fmt.Sprintf("after %s, stage %s", now.Sub(g.since).Round(time.Second), k.stage),
	})
}

// Now returns the groups of the last look; of one device, or of all if device
// is empty.
func (r *Reporter) Now(device string) (out []Hung) {
	if r == nil {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, h := range r.now {
		if device == "" || h.Device == device {
			out = append(out, h)
		}
	}
	return out
}

// pace bounds the lines about the failures of one device: the pause between
// two doubles while requests fail.
type pace struct {
	next  time.Time
	pause time.Duration
	more  int // failures since the last line

	last string    // failure, in words
	at   time.Time // of the last failure
}

// failedLately is the time for that a failure is a condition of its device.
const failedLately = 10 * time.Minute

// LastFailure describes the last failure of a device in the ten minutes before now. It
// returns "" if there was none.
func (r *Reporter) LastFailure(device string, now time.Time) string {
	if r == nil {
		return ""
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.quiet[device]
	if p == nil || now.Sub(p.at) >= failedLately {
		return ""
	}
	return fmt.Sprintf("%s, %s ago", p.last, now.Sub(p.at).Round(time.Second))
}

const (
	firstPause = time.Second
	lastPause  = time.Minute
	maxPaces   = 4096
)

// Failed logs f, unless a line about its device was written lately. Then the
// next line has the number of those left out.
func Failed[D any](r *Reporter, log *slog.Logger, device string, f Failure[D], now time.Time) {
	errno := unix.ErrnoName(unix.Errno(f.Errno))
	r.mu.Lock()
	p := r.quiet[device]
	fresh := p == nil
	if fresh {
		if len(r.quiet) >= maxPaces {
			clear(r.quiet)
		}
		p = &pace{pause: firstPause}
		r.quiet[device] = p
	}
	p.last, p.at = fmt.Sprintf("%s of %d bytes at %d: %s, stage %s", f.Op, f.Len, f.Offset, errno, f.Stage), now
	switch {
	case fresh:
	case now.Before(p.next):
		p.more++
		r.mu.Unlock()
		return
	case now.Sub(p.next) > lastPause:
		p.pause = firstPause
	default:
		p.pause = min(2*p.pause, lastPause)
	}
	more, what := p.more, p.last
	p.next, p.more = now.Add(p.pause), 0
	r.mu.Unlock()
	log.Error("a request failed", "op", f.Op.String(), "offset", f.Offset, "size", f.Len,
		"errno", errno, "stage", f.Stage.String(), "more", more)
	if more > 0 {
		what += fmt.Sprintf("; %d before it", more)
	}
	r.cfg.Journal.Add(journal.Event{Kind: journal.Device, Device: device, To: "request failed", Why: what})
}
