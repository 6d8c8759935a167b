package server

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// A host keeps the name of its incarnation over a stop in order, and over any end of the
// daemon alone. Everything that was open for writing in a boot is flushed at its stop.
func TestE053_IncarnationOutlivesAnOrderlyStop(t *testing.T) {
	const orderly, crash, upgrade = "orderly", "crash", "upgrade"
	type process struct {
		boot string
		open string // node that is opened for writing
		end  string
	}
	for name, x := range map[string]struct {
		before  []process
		same    bool // the boot "next" has the name of the first process
		flushed []string
	}{
		"stop in order":                   {[]process{{"1", "a", orderly}}, true, []string{"a"}},
		"power cut":                       {[]process{{"1", "a", crash}}, false, nil},
		"nothing was open":                {[]process{{"1", "", orderly}}, true, nil},
		"crash of the daemon before":      {[]process{{"1", "a", crash}, {"1", "b", orderly}}, true, []string{"a", "b"}},
		"upgrade before":                  {[]process{{"1", "a", upgrade}, {"1", "b", orderly}}, true, []string{"a", "b"}},
		"crash after a stop in order":     {[]process{{"1", "a", orderly}, {"1", "", crash}}, false, []string{"a"}},
		"power cut after a boot in order": {[]process{{"1", "a", orderly}, {"2", "", crash}}, false, []string{"a"}},
		"two stops in order":              {[]process{{"1", "a", orderly}, {"2", "b", orderly}}, true, []string{"a", "b"}},
		"stop in order after a power cut": {[]process{{"1", "a", crash}, {"2", "b", orderly}}, false, []string{"b"}},
		"no device since the power cut":   {[]process{{"1", "a", crash}, {"2", "", orderly}}, false, nil},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "incarnation")
			var mu sync.Mutex
			var flushed []string
			flush := func(p string) error {
				mu.Lock()
				defer mu.Unlock()
				flushed = append(flushed, p)
				return nil
			}
			begin := func(boot string) *incarnation {
				i := &incarnation{path: file, boot: boot, flush: flush}
				must(t, i.begin())
				return i
			}
			var first string
			for n, p := range x.before {
				i := begin(p.boot)
				if n == 0 {
					first = i.now()
				}
				if p.open != "" {
					must(t, i.noteOpen(p.open))
				}
				if p.end == orderly {
					must(t, i.end(t.Context()))
				} else {
					i.abandon()
				}
			}
			i := begin("next")
			defer i.abandon()
			if same := i.now() == first; same != x.same {
				t.Errorf("first %s, now %s", first, i.now())
			}
			if slices.Sort(flushed); !slices.Equal(flushed, x.flushed) {
				t.Errorf("flushed %q, want %q", flushed, x.flushed)
			}
		})
	}
}

// In doubt the next start is a power cut: a flush that fails or hangs, a record that cannot
// be written or understood, another server that has the record.
func TestE053_IncarnationInDoubt(t *testing.T) {
	for name, x := range map[string]struct {
		flush func(string) error
		after func(t *testing.T, file string)
	}{
		"flush fails": {flush: func(string) error { return syscall.EIO }},
		"flush hangs": {flush: func(string) error { select {} }},
		"torn record": {after: func(t *testing.T, file string) {
			b, err := os.ReadFile(file)
			must(t, err)
			must(t, os.WriteFile(file, b[:len(b)-3], 0o600))
		}},
		"unknown line": {after: func(t *testing.T, file string) {
			b, err := os.ReadFile(file)
			must(t, err)
			must(t, os.WriteFile(file, append(b, "open x\nclean\n"...), 0o600))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "incarnation")
			i := &incarnation{path: file, boot: "1", flush: func(string) error { return nil }}
			if x.flush != nil {
				i.flush = x.flush
			}
			must(t, i.begin())
			must(t, i.noteOpen("a"))
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if err := i.end(ctx); (err != nil) != (x.flush != nil) || err != nil && !errors.Is(err, errUnclean) {
				t.Errorf("end: %v", err)
			}
			if x.after != nil {
				x.after(t, file)
			}
			next := &incarnation{path: file, boot: "2", flush: func(string) error { return nil }}
			must(t, next.begin())
			defer next.abandon()
			if next.now() != "2" {
				t.Errorf("the next boot has the name %s", next.now())
			}
		})
	}
	t.Run("two servers", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "incarnation")
		a, b := &incarnation{path: file, boot: "1"}, &incarnation{path: file, boot: "1"}
		must(t, a.begin())
		defer a.abandon()
		if err := b.begin(); err == nil || b.file != nil || b.now() != "1" {
			t.Errorf("the second server: %v, name %q", err, b.now())
		}
	})
}

// A server that is stopped in order keeps the verifiers of its devices over a start of its
// host, and names what it could not flush.
func TestE053_OrderlyStopOfAServer(t *testing.T) {
	for name, x := range map[string]struct {
		opaque bool // the server cannot flush the device
		same   bool
	}{
		"files":        {false, true},
		"opaque names": {true, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			must(t, os.WriteFile(filepath.Join(dir, "vol"), make([]byte, 1<<20), 0o600))
			file := filepath.Join(t.TempDir(), "incarnation")
			verifier := func(boot string) uint64 {
				mem := newMemory()
				mem.crash, mem.names = plugin.KeepsAcknowledged, plugin.NamesPath
				path := filepath.Join(dir, "vol")
				if x.opaque {
					mem.names = plugin.NamesOpaque
					path = "vol"
				}
				mem.add(path, 1<<20)
				mem.add("vol", 1<<20)
				r := newRig(t, mem, func(c *Config) { c.BootID, c.IncarnationFile, c.SearchPath = boot, file, dir })
				v := r.connect("s").openToWrite("vol").Verifier
				must(t, r.server.Close(t.Context()))
				r.closed = true
				return uint64(v)
			}
			first := verifier("1")
			b, err := os.ReadFile(file)
			must(t, err)
			if clean := strings.HasSuffix(string(b), "clean\n"); clean != x.same {
				t.Errorf("the record is %q", b)
			}
			if next := verifier("2"); (next == first) != x.same {
				t.Errorf("%x, after the reboot %x", first, next)
			}
		})
	}
}
