package logs

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// sink keeps lines; safe for the timer's goroutine.
type sink struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (s *sink) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(p)
}

// take returns the lines so far, without times.
func (s *sink) take() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := strings.TrimSpace(s.buf.String())
	s.buf.Reset()
	if text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

func newTest(level slog.Level) (*Logs, *sink) {
	s := &sink{}
	noTime := func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}
	return New(slog.NewTextHandler(s, &slog.HandlerOptions{Level: Everything.Level, ReplaceAttr: noTime}), level), s
}

func TestLevelsAreOfOneSubsystem(t *testing.T) {
	l, out := newTest(slog.LevelInfo)
	rtrs, server := l.Logger("rtrs"), l.Logger("server").With("pump", 1)
	say := func() []string {
		for _, log := range []*slog.Logger{rtrs, server} {
			log.Debug("d")
			log.Info("i")
			log.Error("e")
		}
		return out.take()
	}
	all := []string{
		"level=DEBUG msg=d subsystem=rtrs", "level=INFO msg=i subsystem=rtrs", "level=ERROR msg=e subsystem=rtrs",
		"level=DEBUG msg=d subsystem=server pump=1", "level=INFO msg=i subsystem=server pump=1", "level=ERROR msg=e subsystem=server pump=1",
	}
	if got := say(); !slices.Equal(got, []string{all[1], all[2], all[4], all[5]}) {
		t.Errorf("at the first level: %q", got)
	}
	if err := l.SetLevel("rtrs", slog.LevelDebug); err != nil {
		t.Fatal(err)
	}
	if err := l.SetLevel("server", slog.LevelError); err != nil {
		t.Fatal(err)
	}
	if got := say(); !slices.Equal(got, []string{all[0], all[1], all[2], all[5]}) {
		t.Errorf("rtrs at debug, server at error: %q", got)
	}
	if got := l.Levels(); !slices.Equal(got, []Level{{"rtrs", slog.LevelDebug}, {"server", slog.LevelError}}) {
		t.Errorf("levels %v", got)
	}
	if err := l.SetLevel(All, slog.LevelDebug); err != nil {
		t.Fatal(err)
	}
	if got := say(); !slices.Equal(got, all) {
		t.Errorf("all at debug: %q", got)
	}
	err := l.SetLevel("rtsr", slog.LevelDebug)
	if !errors.Is(err, syscall.ENOENT) || !strings.Contains(err.Error(), "rtrs, server and all") {
		t.Errorf("unknown subsystem: %v", err)
	}
}

func TestParseLevel(t *testing.T) {
	for _, l := range []slog.Level{slog.LevelDebug, slog.LevelInfo, slog.LevelWarn, slog.LevelError} {
		if got, err := ParseLevel(LevelName(l)); got != l || err != nil {
			t.Errorf("%v: %v, %v", l, got, err)
		}
	}
	for _, bad := range []string{"", "DEBUG", "trace", "info+2"} {
		if _, err := ParseLevel(bad); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestAStormOfLinesIsSummarised(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, out := newTest(slog.LevelInfo)
		log := l.Logger("rtrs").With("session", "s")
		for i := range 1000 {
			log.Warn("again", "i", i)
			log.Info("again") // another level: another message
		}
		l.Logger("server").Warn("again") // another subsystem
		got := out.take()
		if len(got) != 2*perWindow+1 || got[0] != "level=WARN msg=again subsystem=rtrs session=s i=0" {
			t.Errorf("%d lines at once, first %q", len(got), got[0])
		}
		time.Sleep(window + time.Millisecond)
		synctest.Wait()
		got = out.take()
		slices.Sort(got)
		want := []string{
			"level=INFO msg=again subsystem=rtrs session=s left_out=990",
			"level=WARN msg=again subsystem=rtrs session=s left_out=990",
		}
		if !slices.Equal(got, want) {
			t.Errorf("after a second: %q", got)
		}
		log.Warn("again")
		if got := out.take(); len(got) != 1 {
			t.Errorf("in the next second: %q", got)
		}
		time.Sleep(window + time.Millisecond)
		synctest.Wait()
		if got := out.take(); got != nil {
			t.Errorf("nothing was left out, but: %q", got)
		}
	})
}

// Each second has its share, however long the storm is.
func TestALongStorm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, out := newTest(slog.LevelInfo)
		log := l.Logger("rtrs")
		for range 100 { // 10 s of 100 lines each
			for range 10 {
				log.Info("again")
			}
			time.Sleep(window / 10)
		}
		l.Flush()
		written, leftOut := 0, 0
		for _, line := range out.take() {
			var n int
			if _, err := fmt.Sscanf(line, "level=INFO msg=again subsystem=rtrs left_out=%d", &n); err == nil {
				leftOut += n
			} else {
				written++
			}
		}
		if written+leftOut != 1000 || written > 12*perWindow || written < 9*perWindow {
			t.Errorf("%d written, %d left out, of 1000", written, leftOut)
		}
	})
}

func TestFlushSaysWhatWasLeftOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, out := newTest(slog.LevelInfo)
		for range perWindow + 3 {
			l.Logger("x").Info("m")
		}
		out.take()
		l.Flush()
		if got := out.take(); !slices.Equal(got, []string{"level=INFO msg=m subsystem=x left_out=3"}) {
			t.Errorf("%q", got)
		}
		l.Flush() // and the timer is gone, or synctest would wait for it
		if got := out.take(); got != nil {
			t.Errorf("a second time: %q", got)
		}
	})
}

// stuck is a reader of the log that takes no line until it is let go.
type stuck struct {
	entered, letGo chan struct{}
}

func (s *stuck) Write(p []byte) (int, error) {
	s.entered <- struct{}{}
	<-s.letGo
	return len(p), nil
}

// A process that ends after Flush has written what it left out, also when the
// timer was about to write it.
func TestFlushWaitsForTheTimer(t *testing.T) {
	out := &stuck{entered: make(chan struct{}, perWindow+1), letGo: make(chan struct{}, perWindow+1)}
	l := New(slog.NewTextHandler(out, nil), slog.LevelInfo)
	for range perWindow {
		out.letGo <- struct{}{}
		l.Logger("x").Info("m")
		<-out.entered
	}
	l.Logger("x").Info("m") // left out
	go l.limit.flush()      // as the timer does
	<-out.entered
	flushed := make(chan struct{})
	go func() { l.Flush(); close(flushed) }()
	select {
	case <-flushed:
		t.Error("Flush returned before the line was written")
	case <-time.After(50 * time.Millisecond):
	}
	out.letGo <- struct{}{}
	<-flushed
}

// Text that never repeats gets no memory.
func TestMessagesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, out := newTest(slog.LevelInfo)
		log := l.Logger("x")
		for i := range 3 * maxMessages {
			log.Info(fmt.Sprint("line ", i))
		}
		if n := len(l.limit.counts); n > maxMessages+1 {
			t.Errorf("%d messages are kept", n)
		}
		if n := len(out.take()); n != maxMessages+perWindow {
			t.Errorf("%d lines are written", n)
		}
		l.Flush()
		if got := out.take(); len(got) != 1 || !strings.Contains(got[0], fmt.Sprint("left_out=", 2*maxMessages-perWindow)) {
			t.Errorf("%q", got)
		}
	})
}

func TestALineBelowItsLevelAllocatesNothing(t *testing.T) {
	l, _ := newTest(slog.LevelInfo)
	log := l.Logger("x")
	if n := testing.AllocsPerRun(100, func() { log.Debug("m", "n", 1) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
