package plugintest

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// flawed is a backend in memory with one flaw.
type flawed struct {
	flaw   string
	mu     sync.Mutex
	data   []byte
	filled []atomic.Bool // by sector: it was written to
	late   []plugin.Request
	writes int
}

func (b *flawed) Describe() plugin.Info {
	info := plugin.Info{Name: "flawed", Version: "1", Names: plugin.NamesOpaque}
	if b.flaw == "does not keep what it claims to" {
		info.Crash = plugin.KeepsAcknowledged
	}
	return info
}

func (b *flawed) Open(_ context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.flaw == "no reader beside a writer" && r.Device != Device {
		return nil, blk.EBUSY.Err()
	}
	if b.data == nil || b.flaw == "forgets at close" {
		b.data = make([]byte, 4<<20)
		b.filled = make([]atomic.Bool, len(b.data)/512)
	}
	return &flawedDisk{b.flaw, b.data, b.filled}, nil
}

type flawedDisk struct {
	flaw   string
	data   []byte
	filled []atomic.Bool
}

// Extents lists as holes what was not written to, or zeroed since.
func (d *flawedDisk) Extents(_ context.Context, off, n uint64) (list []extents.Extent, _ error) {
	switch d.flaw {
	case "knows nothing of holes":
		return nil, blk.EOPNOTSUPP
	case "says more than it was asked":
		n += 512
	}
	for ok := true; ok && n > 0; off, n = off+512, n-512 {
		filled := off/512 < uint64(len(d.filled)) && d.filled[off/512].Load()
		list, ok = extents.Add(list, 512, !filled)
	}
	return list, nil
}

// note records writes and zeroes in the map of holes. With some flaws it forgets some, or one
// comes late.
func (b *flawed) note(r plugin.Request) {
	b.late = append(b.late, r)
	for len(b.late) > 0 {
		if b.flaw == "is late with its map" && len(b.late) == 1 {
			return
		}
		r, b.late = b.late[0], b.late[1:]
		filled := r.Disk.(*flawedDisk).filled[r.Off/512:][:r.Len/512]
		if b.flaw == "maps half of a write" {
			filled = filled[:(len(filled)+1)/2]
		}
		for i := range filled {
			filled[i].Store(r.Op == blk.Write)
		}
	}
}

func (d *flawedDisk) Limits() blk.Limits {
	l := blk.Limits{Size: uint64(len(d.data)), LogicalBlockSize: 512, MaxWriteZeroes: 1 << 20, FUA: true}
	if d.flaw == "odd limits" {
		l.MaxIOSize = 1000
	}
	return l
}

func (d *flawedDisk) Close() error { return nil }

func (b *flawed) Serve(q *plugin.Queue) error {
	batch := make([]plugin.Request, 16)
	for !q.Closed() {
		n := q.Next(batch)
		for _, r := range batch[:n] {
			q.Complete(r.Tag, b.do(r))
		}
		q.Publish()
		if n == 0 {
			q.Wait()
		}
	}
	return nil
}

func (b *flawed) do(r plugin.Request) blk.Errno {
	d := r.Disk.(*flawedDisk).data
	switch {
	case r.Op == blk.Read:
		copy(r.Buf, d[r.Off:])
	case r.Op == blk.Write:
		b.writes++
		b.note(r)
		if b.flaw == "loses a write" && b.writes%40 == 0 {
			return blk.OK
		}
		if b.flaw == "writes one byte too few" {
			r.Buf = r.Buf[:len(r.Buf)-1]
		}
		copy(d[r.Off:], r.Buf)
	case r.Op == blk.WriteZeroes && b.flaw == "zeroes only when unmapping" && r.Flags&blk.NoUnmap != 0:
	case r.Op == blk.WriteZeroes:
		b.note(r)
		clear(d[r.Off:][:r.Len])
	case r.Op == blk.Flush && b.flaw == "refuses flush":
		return blk.EOPNOTSUPP
	}
	return blk.OK
}

// Environment of such a process: its flaw, and the program to run as a plugin,
// if any.
const (
	flawKey    = "RNBD_TEST_FLAW"
	processKey = "RNBD_TEST_PLUGIN"
)

// TestFlawed is the process of the test below.
func TestFlawed(t *testing.T) {
	flaw := os.Getenv(flawKey)
	if flaw == "" {
		t.Skip("only a process of TestRunIO_FindsFlaws")
	}
	RunIO(t, &flawed{flaw: flaw}, Options{Executable: os.Getenv(processKey)})
}

// TestMain lets this program be the flawed plugin as a process.
func TestMain(m *testing.M) {
	Main(m, func() { plugin.ServeIO(&flawed{flaw: os.Getenv(flawKey)}) })
}

// The suite passes a good backend and finds the flaws of the others.
func TestRunIO_FindsFlaws(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for flaw, says := range map[string]string{
		"none":                       "",
		"loses a write":              "seed",
		"writes one byte too few":    "other bytes than were written",
		"zeroes only when unmapping": "the disk differs at byte 512",
		"refuses flush":              "flush: operation not supported",
		"forgets at close":           "data_stay_over_close_and_open",
		"odd limits":                 "largest request is 1000 bytes",
		"no reader beside a writer":  "open disk: ",

		"knows nothing of holes":      "",
		"is late with its map":        "was answered, and lies in a hole",
		"maps half of a write":        "lies in a hole of",
		"says more than it was asked": "gives a malformed answer",

		"does not keep what it claims to": "survive_SIGKILL",
	} {
		t.Run(flaw, func(t *testing.T) {
			t.Parallel()
			c := exec.Command(exe, "-test.run=^TestFlawed$", "-test.v")
			c.Env = append(os.Environ(), flawKey+"="+flaw)
			if flaw == "does not keep what it claims to" {
				c.Env = append(c.Env, processKey+"="+exe)
			}
			out, err := c.CombinedOutput()
			if (err == nil) != (says == "") || !strings.Contains(string(out), says) {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}
