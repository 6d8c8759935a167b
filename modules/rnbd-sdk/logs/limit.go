package logs

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

const (
	// perWindow lines of one message are written in a window.
	perWindow = 10
	window    = time.Second
	// maxMessages are told apart; the lines of others share one count. Messages
	// are constants of the program or a plugin's, so this is not reached in
	// earnest.
	maxMessages = 1024
)

// message is the key of a line for the limit: its words, not its attributes.
type message struct {
	of    *subsystem
	level slog.Level
	text  string
}

// count is how often a message came in the window that is open.
type count struct {
	lines int
	last  *handler // of the last line left out
}

// limiter counts the lines of each message. A window is opened by a line, and
// closed by a timer that looks at all messages; nothing runs while nothing is
// logged.
type limiter struct {
	mu     sync.Mutex
	counts map[message]*count
	timer  *time.Timer // closes the window; nil: none is open

	// writing is held by a flush until its lines are written, so that the next
	// one, the last of a process for instance, returns after them.
	writing sync.Mutex
}

func newLimiter() *limiter { return &limiter{counts: map[message]*count{}} }

// allow reports whether the line is to be written.
func (l *limiter) allow(h *handler, r *slog.Record) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	m := message{h.of, r.Level, r.Message}
	c := l.counts[m]
	if c == nil {
		if len(l.counts) >= maxMessages {
			m = message{h.of, r.Level, "messages of too many kinds"}
			c = l.counts[m]
		}
		if c == nil {
			c = &count{}
			l.counts[m] = c
		}
	}
	if l.timer == nil {
		l.timer = time.AfterFunc(window, l.flush)
	}
	if c.lines++; c.lines <= perWindow {
		return true
	}
	c.last = h
	return false
}

// flush ends the window and logs the numbers of lines left out; those of an
// earlier flush are written too when it returns.
func (l *limiter) flush() {
	l.writing.Lock()
	defer l.writing.Unlock()
	l.mu.Lock()
	counts := l.counts
	l.counts = map[message]*count{}
	if l.timer != nil {
		l.timer.Stop()
		l.timer = nil
	}
	l.mu.Unlock()
	for m, c := range counts {
		if c.last == nil {
			continue
		}
		r := slog.NewRecord(time.Now(), m.level, m.text, 0)
		r.AddAttrs(slog.Int("left_out", c.lines-perWindow))
		_ = c.last.out.Handle(context.Background(), r)
	}
}
