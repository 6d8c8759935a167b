package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ratelimit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
)

var discard = slog.New(slog.DiscardHandler)

func read(t *testing.T, file string) (out []Record) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		var r Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		out = append(out, r)
	}
	return out
}

func TestRecordsAreLines(t *testing.T) {
	file := filepath.Join(t.TempDir(), "audit.log")
	l, err := Open(file, "server", Continue, discard)
	if err != nil {
		t.Fatal(err)
	}
	uid := 7
	l.Add(Record{Event: EventOpen, Session: "a\n\"b\"", Device: "x", Mode: "rw", Result: ResultOf(errors.New("no\nno"))})
	l.Add(Record{Event: EventCall, Call: "Unmap", UID: &uid, Result: ResultOf(nil)})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	l.Add(Record{Event: EventClose})
	got := read(t, file)
	if len(got) != 2 || got[0].Number != 1 || got[1].Number != 2 || got[0].Session != `a\x0a"b"` || got[0].Result != `no\x0ano` || *got[1].UID != 7 || got[1].Result != OK || got[0].Daemon != "server" || got[0].Time.IsZero() {
		t.Errorf("got %+v", got)
	}
	if st, _ := os.Stat(file); st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v", st.Mode())
	}
	if l.Dropped() != 1 {
		t.Errorf("%d dropped, want the one after the end", l.Dropped())
	}
}

func TestAFileThatIsMovedAway(t *testing.T) {
	dir := t.TempDir()
	file, moved := filepath.Join(dir, "audit.log"), filepath.Join(dir, "audit.log.1")
	l, err := Open(file, "server", Continue, discard)
	if err != nil {
		t.Fatal(err)
	}
	l.Add(Record{Event: "one"})
	sdktest.Eventually(t, "the first record is written", func() bool { return len(read(t, file)) == 1 })
	if err := os.Rename(file, moved); err != nil {
		t.Fatal(err)
	}
	l.Reopen()
	sdktest.Eventually(t, "the file is there again", func() bool { _, err := os.Stat(file); return err == nil })
	l.Add(Record{Event: "two"})
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if a, b := read(t, moved), read(t, file); len(a) != 1 || len(b) != 1 || b[0].Event != "two" {
		t.Errorf("%+v, then %+v", a, b)
	}
}

// stuck is a place that takes nothing until it is let go.
type stuck struct {
	gate chan struct{}
	mu   sync.Mutex
	buf  bytes.Buffer
}

func (s *stuck) Write(b []byte) (int, error) {
	<-s.gate
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(b)
}

func (s *stuck) Close() error { return nil }

// A place that does not answer holds up nobody: records are dropped, and the next
// one says how many.
func TestAPlaceThatHangs(t *testing.T) {
	s := &stuck{gate: make(chan struct{})}
	l := newLog("server", discard)
	l.open = func() (io.WriteCloser, error) { return s, nil }
	l.start(s)
	begin := time.Now()
	const many = queueLength + 1000
	for range many {
		l.Add(Record{Event: "x"})
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("%d records took %s", many, took)
	}
	lost := l.Dropped()
	if lost < 900 || lost > 1000 {
		t.Errorf("%d were dropped", lost)
	}
	close(s.gate)
	sdktest.Eventually(t, "a record says what is missing", func() bool {
		l.Add(Record{Event: "y"})
		s.mu.Lock()
		defer s.mu.Unlock()
		return strings.Contains(s.buf.String(), `"missing":`)
	})
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	var n, missing uint64
	for line := range strings.Lines(s.buf.String()) {
		var r Record
		if err := json.Unmarshal([]byte(line), &r); err != nil {
			t.Fatal(err)
		}
		if r.Number != n+r.Missing+1 {
			t.Fatalf("record %d follows %d, with %d missing", r.Number, n, r.Missing)
		}
		n, missing = r.Number, missing+r.Missing
	}
	if missing != l.Dropped() {
		t.Errorf("records say that %d are missing, %d were dropped", missing, l.Dropped())
	}
}

func TestPlacesThatAreRefused(t *testing.T) {
	dir := t.TempDir()
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "none", "x")
	if err := os.Symlink(filepath.Join(dir, "target"), link); err != nil {
		t.Fatal(err)
	}
	for _, place := range []string{link, fifo, dir, "/dev/null"} {
		if l, err := Open(place, "server", Continue, discard); err == nil {
			l.Close()
			t.Errorf("%s is accepted", place)
		}
	}
}

// A full disk is said once, and counted.
func TestAPlaceThatFails(t *testing.T) {
	var text bytes.Buffer
	l := newLog("server", slog.New(slog.NewTextHandler(&text, nil)))
	l.open = func() (io.WriteCloser, error) { return full{}, nil }
	l.start(full{})
	for range 10 {
		l.Add(Record{Event: "x"})
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if l.Dropped() != 10 || strings.Count(text.String(), "level=ERROR") != 1 {
		t.Errorf("%d dropped: %s", l.Dropped(), &text)
	}
	var none *Log
	none.Add(Record{})
	none.Reopen()
	if none.Close() != nil || none.Dropped() != 0 {
		t.Error("a nil log does something")
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }
func (full) Close() error              { return nil }

// A peer has a few records in a short time, and a number. Refused acts of a peer leave
// room for those that are done.
func TestRecordsOfAPeerAreBounded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "audit.log")
	l, err := Open(file, "server", Continue, discard)
	if err != nil {
		t.Fatal(err)
	}
	a, b := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	const many = 28801
	for range many {
		l.AddPeer(a, Record{Event: EventOpen, Session: strings.Repeat("\xff", 300), Device: strings.Repeat("\x1b", 300), Result: strings.Repeat("no", 5000), Client: "192.0.2.1:1"})
	}
	l.AddPeer(a, Record{Event: EventOpen, Device: "x", Result: OK})
	l.AddPeer(b, Record{Event: EventOpen, Device: "y", Result: "no"})
	for range 100 { // a host maps all that it has
		l.AddPeer(b, Record{Event: EventOpen, Device: "z", Result: OK})
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	count, leftOut := map[string]int{}, uint64(0)
	for _, r := range read(t, file) {
		count[r.Device[:min(len(r.Device), 1)]]++
		leftOut += r.LeftOut
		if r.LeftOut > 0 && (r.Client != "192.0.2.1" || r.Session != "") {
			t.Errorf("the rest: %+v", r)
		}
	}
	if count[`\`] != ratelimit.Refusals.Burst || count["x"] != 1 || count["y"] != 1 || count["z"] != 100 || leftOut != uint64(many-ratelimit.Refusals.Burst) {
		t.Errorf("%v, %d left out", count, leftOut)
	}
	if st, err := os.Stat(file); err != nil || st.Size() > 100_000 {
		t.Errorf("%d bytes, %v", st.Size(), err)
	}
}

// smallDisk takes bytes up to its size.
type smallDisk struct {
	mu   sync.Mutex
	size int
	text bytes.Buffer
}

func (d *smallDisk) Write(b []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, _ := d.text.Write(b[:min(len(b), d.size-d.text.Len())])
	if n < len(b) {
		return n, syscall.ENOSPC
	}
	return n, nil
}

func (d *smallDisk) Close() error { return nil }

func (d *smallDisk) grow(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.size += n
}

// On a full disk acts are refused until a record is written again, if the log is told so.
// A line that was cut is not continued by the next one.
func TestAFullDisk(t *testing.T) {
	for full, refused := range map[Full]bool{Continue: false, Refuse: true} {
		d := &smallDisk{size: 100}
		l := newLog("server", discard)
		l.full, l.open = full, func() (io.WriteCloser, error) { return d, nil }
		l.start(d)
		if err := l.Refusal(); err != nil {
			t.Errorf("%s: before the first record: %v", full, err)
		}
		l.Add(Record{Event: "one", Result: strings.Repeat("x", 200)})
		sdktest.Eventually(t, "the record is lost", func() bool { return errors.Is(l.Failed(), syscall.ENOSPC) })
		if err := l.Refusal(); (err != nil) != refused || refused && !errors.Is(err, syscall.EAGAIN) {
			t.Errorf("%s: refused with %v", full, err)
		}
		d.grow(1000)
		l.Add(Record{Event: "two"})
		sdktest.Eventually(t, "a record is written", func() bool { return l.Failed() == nil })
		if err := errors.Join(l.Refusal(), l.Close()); err != nil {
			t.Errorf("%s: %v", full, err)
		}
		all := strings.Split(d.text.String(), "\n")
		var r Record
		if len(all) != 3 || json.Unmarshal([]byte(all[1]), &r) != nil || r.Event != "two" {
			t.Errorf("%s: %q", full, all)
		}
	}
}
