package logs

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

// writerSize bounds the bytes of the lines that wait in a Writer.
const writerSize = 1 << 20

// Writer writes the lines of a log without making their authors wait. Write puts a
// line into a queue of at most 1 MiB, and one goroutine writes the queue to the
// output. While the output accepts nothing and the queue is full, or while the output
// fails, lines are dropped and counted; one line reports their number as soon as the
// output accepts lines again. All methods may be called from any goroutine.
type Writer struct {
	out    io.Writer
	format func(io.Writer) slog.Handler

	mu      sync.Mutex
	changed sync.Cond // of everything below
	queue   [][]byte  // lines that wait, oldest first
	size    int       // bytes of queue, and of the line that is written
	busy    bool      // the goroutine writes a line
	lost    uint64    // lines dropped since the last report
	asked   bool      // a line was dropped since the last attempt to report
}

// NewWriter returns a Writer to out, whose goroutine runs until the process ends.
// format makes the handler of the lines, and of the report of lost lines.
func NewWriter(out io.Writer, format func(io.Writer) slog.Handler) *Writer {
	w := &Writer{out: out, format: format}
	w.changed.L = &w.mu
	go w.run()
	return w
}

// Stderr returns a Writer to the standard error of this process. From then on SIGPIPE
// does not end the process: a reader of its output that goes away costs lines only.
func Stderr(format func(io.Writer) slog.Handler) *Writer {
	// Notify, because programs started later would inherit what Ignore sets.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	return NewWriter(os.Stderr, format)
}

// Handler returns a handler whose lines go to w.
func (w *Writer) Handler() slog.Handler { return w.format(w) }

// Write queues a copy of line, or drops and counts the line. The error is always nil.
func (w *Writer) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lost > 0 || w.size+len(line) > writerSize { // behind a lost line, all lines up to the report are lost
		w.lost++
		w.asked = true
	} else {
		w.queue = append(w.queue, bytes.Clone(line))
		w.size += len(line)
	}
	w.changed.Broadcast()
	return len(line), nil
}

// Flush waits until all lines are written, for at most limit.
func (w *Writer) Flush(limit time.Duration) {
	expired := false
	timer := time.AfterFunc(limit, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		expired = true
		w.changed.Broadcast()
	})
	defer timer.Stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	for !expired && (w.busy || len(w.queue) > 0 || w.asked) {
		w.changed.Wait()
	}
}

// run writes the lines.
func (w *Writer) run() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for {
		switch {
		case len(w.queue) > 0:
			line := w.queue[0]
			w.queue[0], w.queue = nil, w.queue[1:]
			if !w.writeUnlocked(line) {
				w.lost++
				w.asked = true
			}
			w.size -= len(line)
		case w.asked:
			w.report()
		default:
			w.changed.Wait()
		}
	}
}

// report writes the number of lost lines. After a failure the next lost line causes
// another attempt.
func (w *Writer) report() {
	lost := w.lost
	w.asked = false
	var line bytes.Buffer
	r := slog.NewRecord(time.Now(), slog.LevelWarn, "lines of the log are lost: its reader did not accept them", 0)
	r.AddAttrs(slog.Uint64("lost", lost))
	_ = w.format(&line).Handle(context.Background(), r) // a bytes.Buffer does not fail
	if w.writeUnlocked(line.Bytes()) {
		w.lost -= lost
		w.asked = w.lost > 0
	}
}

// writeUnlocked writes one line while w.mu is not held, and reports success.
func (w *Writer) writeUnlocked(line []byte) bool {
	w.busy = true
	w.mu.Unlock()
	_, err := w.out.Write(line)
	w.mu.Lock()
	w.busy = false
	w.changed.Broadcast()
	return err == nil
}
