package plugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
)

// The test binary is every process that the tests need: RNBD_TEST_ROLE
// selects it.
const roleKey = "RNBD_TEST_ROLE"

func TestMain(m *testing.M) {
	role := os.Getenv(roleKey)
	switch {
	case len(os.Args) == 2 && os.Args[1] == confine.Argument:
		confine.Exec()
	case len(os.Args) == 3 && os.Args[1] == lacking:
		launchLacking(os.Args[2])
	case role == "host":
		playHost()
	case role != "" && StartedByHost():
		playPlugin(role)
	default:
		// A descriptor that the caller of the tests left open is no leak of the host's.
		if err := unix.CloseRange(3, math.MaxUint32, unix.CLOSE_RANGE_CLOEXEC); err != nil {
			fmt.Fprintln(os.Stderr, "close_range:", err)
		}
		os.Exit(m.Run())
	}
}

func playPlugin(role string) {
	switch role {
	case "memory":
		ServeIO(newMemory())
	case "deaf":
		ServeIO(&memory{deaf: true})
	case "front end":
		ServeFrontend(&testFront{})
	case "exits":
		fmt.Fprintln(os.Stderr, "no licence found")
		os.Exit(3)
	case "panics":
		panic("at the start")
	case "hangs":
		time.Sleep(time.Minute)
	case "babbles":
		fmt.Println("hello, I am a program")
		time.Sleep(time.Minute)
	case "protocol 7":
		serve(newMemory(), newMemory().Describe(), versions{protocol: 7, ring: RingVersion})
	case "ring 9":
		serve(newMemory(), newMemory().Describe(), versions{protocol: ProtocolVersion, ring: 9})
	default:
		fmt.Fprintln(os.Stderr, "unknown role", role)
		os.Exit(2)
	}
}

// self is a Config that starts this binary in a role.
func self(t testing.TB, role string) Config {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	kind := KindIO
	if role == "front end" {
		kind = KindFrontend
	}
	return Config{Path: exe, Kind: kind, Name: role, Env: roleEnv(role), Logger: slog.New(slog.DiscardHandler)}
}

// roleEnv also makes race-enabled plugins end without the usual second of
// sleep.
func roleEnv(role string) []string {
	return []string{roleKey + "=" + role, "GORACE=atexit_sleep_ms=0"}
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	t.Cleanup(cancel)
	return ctx
}

func launchT(t testing.TB, c Config) *Process {
	t.Helper()
	p, err := Launch(testContext(t), c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Kill()
		<-p.cleaned
	})
	return p
}

// memory is a Backend with disks in memory. Some names do special things.
type memory struct {
	deaf     bool          // Serve never returns
	gate     chan struct{} // if set, requests are answered once it is closed
	taken    atomic.Int32  // requests that wait for it
	settings map[string]string
	arenas   sync.Map

	mu     sync.Mutex
	closed int
	size   uint64 // of disks, from the next open or resize on
}

func newMemory() *memory { return &memory{size: 1 << 20} }

func (b *memory) Describe() Info {
	crash := KeepsFlushed
	if b.settings["keeps"] == "acknowledged" {
		crash = KeepsAcknowledged
	}
	return Info{Name: "memory", Version: "0.1", Crash: crash, Names: NamesOpaque, Matches: RegularFiles}
}

func (b *memory) Configure(s map[string]string) error {
	if _, bad := s["colour"]; bad {
		return fmt.Errorf("unknown setting %q: %w", "colour", blk.EINVAL)
	}
	b.settings = s
	return nil
}

func (b *memory) AttachArena(id uint32, mem []byte) error {
	if len(mem) == 3*4096 {
		return fmt.Errorf("odd arena: %w", blk.EMSGSIZE)
	}
	b.arenas.Store(id, mem)
	return nil
}

func (b *memory) DetachArena(id uint32) { b.arenas.Delete(id) }

func (b *memory) Open(ctx context.Context, r OpenRequest) (Disk, error) {
	switch name, arg, _ := strings.Cut(r.Name, ":"); name {
	case "busy":
		return nil, fmt.Errorf("take %s: %w", r.Name, errors.Join(errors.New("two reasons"), blk.EBUSY))
	case "no errno":
		return nil, errors.New("it did not work")
	case "slow":
		<-ctx.Done()
	case "env":
		v, ok := os.LookupEnv(arg)
		return nil, fmt.Errorf("%s=%q %v", arg, v, ok)
	case "args":
		return nil, fmt.Errorf("%q", os.Args)
	case "panic":
		panic("in open")
	case "try":
		return nil, attempt(arg, r.File)
	case "odd":
		return &memDisk{b: b, limits: blk.Limits{Size: 1000, LogicalBlockSize: 512}}, nil
	case "log":
		slog.Warn("careful", "disk", r.Name)
		slog.Info("counted", "size", 134217728)
		fmt.Println("printed to stdout")
		fmt.Fprintln(os.Stderr, "printed to stderr")
	}
	return &memDisk{b: b, data: make([]byte, 1<<20), limits: blk.Limits{Size: b.size, LogicalBlockSize: 512, MaxIOSize: 64 << 10}}, nil
}

func (b *memory) Serve(q *Queue) error {
	batch := make([]Request, 16)
	var held []Request
	gate := b.gate
	for !q.Closed() || b.deaf {
		n := q.Next(batch)
		if gate != nil {
			held = append(held, batch[:n]...)
			b.taken.Add(int32(n))
			select {
			case <-gate:
				gate = nil
				serveAll(q, held)
			case <-time.After(time.Millisecond):
			}
			continue
		}
		if serveAll(q, batch[:n]) == 0 {
			q.Wait()
		}
	}
	return nil
}

func serveAll(q *Queue, rs []Request) int {
	for _, r := range rs {
		d := r.Disk.(*memDisk)
		switch r.Op {
		case blk.Read:
			copy(r.Buf, d.data[r.Off:])
		case blk.Write:
			copy(d.data[r.Off:], r.Buf)
		}
		q.Complete(r.Tag, blk.OK)
	}
	q.Publish()
	return len(rs)
}

type memDisk struct {
	b      *memory
	data   []byte
	limits blk.Limits
}

func (d *memDisk) Limits() blk.Limits { return d.limits }

func (d *memDisk) Resize(context.Context) (blk.Limits, error) {
	d.b.mu.Lock()
	defer d.b.mu.Unlock()
	d.limits.Size = d.b.size
	return d.limits, nil
}

func (d *memDisk) Close() error {
	d.b.mu.Lock()
	defer d.b.mu.Unlock()
	d.b.closed++
	return nil
}

func (b *memory) closes() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.closed
}
