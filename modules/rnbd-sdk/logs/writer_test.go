package logs

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
)

func text(w io.Writer) slog.Handler {
	return slog.NewTextHandler(w, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})
}

// reader is the reader of a log. It stalls while accept is not closed.
type reader struct {
	sink
	accept chan struct{}
}

func (r *reader) Write(p []byte) (int, error) {
	<-r.accept
	return r.sink.Write(p)
}

const lostText = `level=WARN msg="lines of the log are lost: its reader did not accept them" lost=`

// A reader that stalls delays no line's author, and learns how many lines are lost.
func TestWriter_ReaderThatStalls(t *testing.T) {
	out := &reader{accept: make(chan struct{})}
	w := NewWriter(out, text)
	line := strings.Repeat("x", 1023) + "\n"
	const lost = 100
	begin := time.Now()
	for range writerSize/len(line) + lost {
		if n, err := w.Write([]byte(line)); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	w.Flush(time.Millisecond)
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("the lines took %s", took)
	}
	close(out.accept)
	w.Flush(time.Minute)
	got := out.take()
	if n := len(got); n != writerSize/len(line)+1 || got[n-1] != lostText+"100" {
		t.Errorf("%d lines, the last is %.200q", n, got[n-1])
	}
	slog.New(w.Handler()).Info("again")
	w.Flush(time.Minute)
	if got := out.take(); len(got) != 1 || got[0] != "level=INFO msg=again" {
		t.Errorf("behind the report: %q", got)
	}
}

// broken fails until it is repaired.
type broken struct {
	sink
	repaired bool
}

func (b *broken) Write(p []byte) (int, error) {
	b.mu.Lock()
	repaired := b.repaired
	b.mu.Unlock()
	if !repaired {
		return 0, errors.New("broken pipe")
	}
	return b.sink.Write(p)
}

func TestWriter_OutputThatFails(t *testing.T) {
	out := &broken{}
	w := NewWriter(out, text)
	log := slog.New(w.Handler())
	for range 3 {
		log.Info("lost")
		w.Flush(time.Minute)
	}
	out.mu.Lock()
	out.repaired = true
	out.mu.Unlock()
	log.Info("this line is the last that is lost")
	w.Flush(time.Minute)
	log.Info("again")
	w.Flush(time.Minute)
	if got := strings.Join(out.take(), "\n"); got != lostText+"4\nlevel=INFO msg=again" {
		t.Errorf("%s", got)
	}
}

const envStderr = "RNBD_TEST_STDERR"

// A process whose reader of standard error has gone lives on, and programs that it starts
// have the default action of SIGPIPE.
func TestStderr_ReaderThatIsGone(t *testing.T) {
	if os.Getenv(envStderr) != "" {
		w := Stderr(text)
		for range 3 {
			slog.New(w.Handler()).Info("nobody reads this")
			w.Flush(time.Minute)
		}
		status, err := exec.Command("grep", "SigIgn", "/proc/self/status").Output()
		if err != nil {
			t.Fatal(err)
		}
		os.Stdout.Write(status)
		os.Exit(0)
	}
	r, stderr, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	r.Close()
	defer stderr.Close()
	c := exec.Command(os.Args[0], "-test.run=^TestStderr_ReaderThatIsGone$")
	c.Env, c.Stderr = append(os.Environ(), envStderr+"=1"), stderr
	out, err := c.Output()
	var ignored uint64 // a bit for each signal from 1 on; the test's own process may ignore others
	if _, serr := fmt.Sscanf(string(out), "SigIgn: %x", &ignored); err != nil || serr != nil || ignored>>(syscall.SIGPIPE-1)&1 != 0 {
		t.Errorf("%v, %v, %q", err, serr, out)
	}
}

func TestWriter_WritesWithoutFlush(t *testing.T) {
	out := &sink{}
	w := NewWriter(out, text)
	slog.New(w.Handler()).Info("m")
	sdktest.Eventually(t, "the line is written", func() bool {
		out.mu.Lock()
		defer out.mu.Unlock()
		return out.buf.String() == "level=INFO msg=m\n"
	})
}
