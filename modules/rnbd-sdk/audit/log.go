package audit

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"log/syslog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ratelimit"
)

// queueLength is how many records may wait to be written.
const queueLength = 4096

// closeTime bounds how long Close waits for what is queued.
const closeTime = 2 * time.Second

// warnPause is the least time between two lines of the daemon's log about records
// that could not be written.
const warnPause = time.Minute

// Syslog is the place that stands for the system's log.
const Syslog = "syslog"

// Log takes records. A nil Log takes none. Its methods may be called by any
// goroutine.
type Log struct {
	daemon  string
	log     *slog.Logger
	open    func() (io.WriteCloser, error)
	queue   chan Record
	reopen  chan struct{}
	written sync.WaitGroup
	dropped atomic.Uint64 // in all
	full    Full
	failed  atomic.Pointer[error] // why the last record is lost; nil: it is written

	// The limiters of the records that peers cause: those of acts that were refused, and
	// the others.
	refusals, acts *ratelimit.Limiter[netip.Addr, Record]

	mu      sync.Mutex // guards the rest
	closed  bool
	number  uint64
	missing uint64 // since the last record that was queued
}

// Full says what happens while records cannot be written.
type Full string

// Values of Full.
const (
	Continue Full = "continue" // nothing: records are lost, and counted
	Refuse   Full = "refuse"   // acts that need a record are refused: Log.Refusal
)

// Refusal returns the reason to refuse acts that need a record: with Refuse, the error
// of the last record, until one is written again. It wraps EAGAIN.
func (l *Log) Refusal() error {
	if l == nil || l.full != Refuse {
		return nil
	}
	if err := l.failed.Load(); err != nil {
		return fmt.Errorf("the audit log cannot be written, and acts without a record are refused: %w: %w", *err, syscall.EAGAIN)
	}
	return nil
}

// Failed returns why the last record was lost, nil if it was written.
func (l *Log) Failed() error {
	if l != nil {
		if err := l.failed.Load(); err != nil {
			return *err
		}
	}
	return nil
}

// Open returns a log that writes to place, the path of a file or Syslog. daemon is
// the name in each record. Failures to write go to log. A file is made with mode 0600
// where it is not there; a link in its place is refused.
func Open(place, daemon string, full Full, log *slog.Logger) (*Log, error) {
	l := newLog(daemon, log)
	l.full = full
	l.open = func() (io.WriteCloser, error) { return openFile(place) }
	if place == Syslog {
		l.open = func() (io.WriteCloser, error) { return syslog.New(syslog.LOG_AUTHPRIV|syslog.LOG_INFO, "rnbd-"+daemon) }
	}
	w, err := l.open()
	if err != nil {
		return nil, fmt.Errorf("audit log: %w", err)
	}
	l.start(w)
	return l, nil
}

func newLog(daemon string, log *slog.Logger) *Log {
	l := &Log{daemon: daemon, log: log}
	l.refusals, l.acts = ratelimit.New(ratelimit.Refusals, l.addLimited), ratelimit.New(ratelimit.Clients, l.addLimited)
	return l
}

// AddPeer is Add for a record that a peer at the address from has caused. Of many in a
// short time it adds some, and how many were left out. Refused acts leave their room to
// those that are done.
func (l *Log) AddPeer(from netip.Addr, r Record) {
	switch {
	case l == nil:
	case r.LeftOut > 0: // the sender has a limit of its own
		l.Add(r)
	case r.Result == OK:
		l.acts.Add(ratelimit.Host(from), r)
	default:
		l.refusals.Add(ratelimit.Host(from), r)
	}
}

// addLimited adds a record that the limiters pass on.
func (l *Log) addLimited(from netip.Addr, r Record, leftOut uint64) {
	if leftOut > 0 {
		r.LeftOut, r.Session, r.Claimed, r.Device, r.Mode, r.Client = leftOut, "", "", "", "", ""
		if from.IsValid() {
			r.Client = from.String()
		}
	}
	l.Add(r)
}

func openFile(path string) (io.WriteCloser, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file: %w", path, syscall.EINVAL)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func (l *Log) start(w io.WriteCloser) {
	l.queue, l.reopen = make(chan Record, queueLength), make(chan struct{}, 1)
	l.written.Go(func() { l.write(w) })
}

// Add queues r, or drops it if the queue is full or the log is closed. It does not
// wait.
func (l *Log) Add(r Record) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.number++
	if r.Time.IsZero() {
		r.Time = time.Now()
	}
	r.Time, r.Number, r.Daemon, r.Missing = r.Time.UTC(), l.number, l.daemon, l.missing
	r.spell()
	if !l.closed {
		select {
		case l.queue <- r:
			l.missing = 0
			return
		default:
		}
	}
	l.missing++
	l.lose(errBehind)
}

var errBehind = fmt.Errorf("%d records wait to be written", queueLength)

// lose counts a record that is lost.
func (l *Log) lose(err error) {
	l.dropped.Add(1)
	l.failed.Store(&err)
}

// Dropped is the number of records that were dropped, or could not be written.
func (l *Log) Dropped() uint64 {
	if l == nil {
		return 0
	}
	return l.dropped.Load()
}

// Reopen opens the file again, which may have been moved away.
func (l *Log) Reopen() {
	if l == nil {
		return
	}
	select {
	case l.reopen <- struct{}{}:
	default: // it is asked for already
	}
}

// Close writes what is queued, for a bounded time, and ends the log.
func (l *Log) Close() error {
	if l == nil {
		return nil
	}
	l.refusals.Flush()
	l.acts.Flush()
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	close(l.queue)
	l.mu.Unlock()
	done := make(chan struct{})
	go func() { l.written.Wait(); close(done) }()
	select {
	case <-done:
		return nil
	case <-time.After(closeTime):
		return fmt.Errorf("audit log: what is queued is not written within %s", closeTime)
	}
}

// write is the one goroutine that writes.
func (l *Log) write(w io.WriteCloser) {
	defer func() { w.Close() }()
	var warned time.Time
	var out lines
	failed := func(err error) {
		if now := time.Now(); now.Sub(warned) >= warnPause {
			warned = now
			l.log.Error("the audit log is not written: records are lost", "err", err)
		}
	}
	for {
		select {
		case <-l.reopen:
			next, err := l.open()
			if err != nil {
				failed(err)
				continue
			}
			w.Close()
			w = next
		case r, ok := <-l.queue:
			if !ok {
				return
			}
			if err := out.write(w, r); err != nil {
				l.lose(err)
				failed(err)
				continue
			}
			l.failed.Store(nil)
		}
	}
}

// lines writes records, each in a line of its own.
type lines struct{ torn bool } // torn reports that the end of a line is missing

func (l *lines) write(w io.Writer, r Record) error {
	line, err := json.Marshal(r)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	if l.torn {
		line = append([]byte{'\n'}, line...)
	}
	n, err := w.Write(line)
	l.torn = err != nil && (l.torn || n > 0)
	return err
}
