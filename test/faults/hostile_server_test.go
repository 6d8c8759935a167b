package faults

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/test/lab"
)

// liar is a server that speaks RTRS as it should and RNBD as a test says.
type liar struct {
	mu     sync.Mutex
	answer func(kind uint16, op *rtrs.Op) int // writes to op.Data() and returns the errno
	heard  atomic.Int64
}

func (l *liar) SessionUp(*rtrs.SrvSession) error { return nil }
func (l *liar) SessionDown(*rtrs.SrvSession)     {}

func (l *liar) Request(op *rtrs.Op) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.heard.Add(1)
	op.Respond(l.answer(rnbdwire.TypeOf(op.User()), op))
}

func (l *liar) set(answer func(uint16, *rtrs.Op) int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.answer = answer
}

// heap is chunk memory.
type heap []byte

func (h heap) Bytes() []byte { return h }
func (h heap) Close() error  { return nil }

// startLiar listens at addr until the end of the test.
func startLiar(t *testing.T, dev verbs.Device, addr netip.AddrPort) (*liar, netip.AddrPort) {
	t.Helper()
	p, err := rtrs.NewPoller(0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var polled sync.WaitGroup
	polled.Go(func() { p.Run(ctx) })
	l := &liar{answer: honestAnswer}
	cfg := rtrs.DefaultServerConfig()
	cfg.Pollers, cfg.QueueDepth, cfg.ChunkSize, cfg.Handler = []*rtrs.Poller{p}, 16, 8192, l
	cfg.Logger = slog.New(slog.DiscardHandler)
	cfg.Alloc = func(size int) (rtrs.Memory, error) { return heap(make([]byte, size)), nil }
	s, err := rtrs.NewServer(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if addr, err = s.Listen(dev, addr); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		limit, done := context.WithTimeout(context.Background(), enough)
		defer done()
		if err := s.Close(limit); err != nil {
			t.Errorf("close the lying server: %v", err)
		}
		cancel()
		polled.Wait()
		p.Close()
	})
	return l, addr
}

// openRsp is a device of 1 MiB, with changes.
func openRsp(edit func(*rnbdwire.OpenRspFields)) []byte {
	f := rnbdwire.OpenRspFields{DeviceID: 3, Sectors: 2048, MaxHWSectors: 8, PhysicalBlockSize: 512, LogicalBlockSize: 512, MaxSegments: 1, CachePolicy: 1}
	if edit != nil {
		edit(&f)
	}
	b := make([]byte, rnbdwire.OpenRspSize)
	f.Put(b)
	return b
}

func sessRsp() []byte {
	b := make([]byte, rnbdwire.SessInfoRspSize)
	rnbdwire.SessInfoRspFields{Version: rnbdwire.Version}.Put(b)
	return b
}

// honestAnswer serves a device that takes everything.
func honestAnswer(kind uint16, op *rtrs.Op) int {
	switch kind {
	case rnbdwire.TypeSessInfo:
		copy(op.Data(), sessRsp())
	case rnbdwire.TypeOpen, rnbdwire.TypeOpenAs:
		copy(op.Data(), openRsp(nil))
	}
	return 0
}

// lie is a wrong answer to messages of a type.
type lie struct {
	name  string
	kinds []uint16
	data  []byte
	errno int
}

func lies() (list []lie) {
	sess, open := []uint16{rnbdwire.TypeSessInfo}, []uint16{rnbdwire.TypeOpen, rnbdwire.TypeOpenAs}
	for _, what := range []struct {
		name  string
		kinds []uint16
		right []byte
	}{{"SESS_INFO", sess, sessRsp()}, {"OPEN", open, openRsp(nil)}} {
		for _, fill := range []byte{0, 1, 0x7f, 0x80, 0xff} {
			list = append(list, lie{fmt.Sprintf("%s answered with %#x", what.name, fill), what.kinds, bytes.Repeat([]byte{fill}, 4096), 0})
		}
		for _, errno := range []int{-1, 1, 22, 511, 1 << 18} {
			list = append(list, lie{fmt.Sprintf("%s answered with errno %d", what.name, errno), what.kinds, what.right, errno})
		}
		for kind := range byte(8) {
			b := bytes.Clone(what.right)
			b[0] = kind
			list = append(list, lie{fmt.Sprintf("%s answered by type %d", what.name, kind), what.kinds, b, 0})
		}
	}
	for name, edit := range map[string]func(*rnbdwire.OpenRspFields){
		"no size":                 func(f *rnbdwire.OpenRspFields) { f.Sectors = 0 },
		"a size beyond all":       func(f *rnbdwire.OpenRspFields) { f.Sectors = 1<<64 - 1 },
		"a size that overflows":   func(f *rnbdwire.OpenRspFields) { f.Sectors = 1 << 55 },
		"no block":                func(f *rnbdwire.OpenRspFields) { f.LogicalBlockSize, f.PhysicalBlockSize = 0, 0 },
		"an odd block":            func(f *rnbdwire.OpenRspFields) { f.LogicalBlockSize = 513 },
		"a huge block":            func(f *rnbdwire.OpenRspFields) { f.LogicalBlockSize = 1 << 15 },
		"no request size":         func(f *rnbdwire.OpenRspFields) { f.MaxHWSectors = 0 },
		"a huge request size":     func(f *rnbdwire.OpenRspFields) { f.MaxHWSectors = 1<<32 - 1 },
		"no segments":             func(f *rnbdwire.OpenRspFields) { f.MaxSegments = 0 },
		"a huge discard":          func(f *rnbdwire.OpenRspFields) { f.MaxDiscardSectors, f.DiscardGranularity = 1<<32-1, 3 },
		"huge zeroes":             func(f *rnbdwire.OpenRspFields) { f.MaxWriteZeroesSects = 1<<32 - 1 },
		"unknown cache policy":    func(f *rnbdwire.OpenRspFields) { f.CachePolicy = 255 },
		"the id of another":       func(f *rnbdwire.OpenRspFields) { f.DeviceID = 1<<32 - 1 },
		"a volume of no identity": func(f *rnbdwire.OpenRspFields) { f.Volume, f.Properties = 1<<64-1, 1<<16-1 },
	} {
		list = append(list, lie{"a device with " + name, open, openRsp(edit), 0})
	}
	return list
}

// A server that answers whatever it likes, on fabrics of real processes: the client
// daemon lives, a device of an honest server is used meanwhile without an error, and
// nothing is left when the lying server's devices are unmapped.
func TestHostileServerOfARealClient(t *testing.T) {
	quiet := slog.New(slog.DiscardHandler)
	for _, fabric := range []string{"iwarp", "rocev2"} {
		t.Run(fabric, func(t *testing.T) {
			l := lab.New(t)
			s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk", 1<<20), Plugins: []string{"fileio"}})
			c := l.Client(lab.ClientOptions{Extra: []string{"--log-level", "error"}})
			victim := &nbdUser{t, mustDial(t, c, l.Map(c, "disk", s).Name), 4}

			var dev verbs.Device
			var err error
			addr, suffix := "127.0.0.1:0", ""
			if fabric == "iwarp" {
				cfg := iwarp.DefaultConfig()
				cfg.Logger = quiet
				dev, err = iwarp.Open(cfg)
			} else {
				addr, suffix = lab.LoopbackAddr(13)+":1234", "%rocev2"
				dev, err = rocev2.Open(rocev2.Config{IRD: -1, ORD: -1, Logger: quiet})
			}
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { dev.Close() })
			liar, at := startLiar(t, dev, netip.MustParseAddrPort(addr))
			path := at.String() + suffix
			if fabric == "rocev2" {
				path = lab.LoopbackAddr(14) + "@" + path
			}
			try := func(name string) error {
				ctx, cancel := context.WithTimeout(t.Context(), enough)
				defer cancel()
				d, err := c.API.Map(ctx, &controlpb.MapRequest{Path: name, Paths: []string{path}, Session: "liar"})
				if err == nil {
					use(c, d.Name)
					err = c.Unmap(d.Name, true)
					if err != nil {
						t.Fatalf("%s: unmap: %v", name, err)
					}
				}
				return err
			}
			if err := try("honest"); err != nil {
				t.Fatalf("before the first lie: %v", err)
			}
			base := holdingOf(t, c.PID())
			var quit atomic.Bool
			took := make(chan []time.Duration, 1)
			go func() { took <- victim.run(quit.Load) }()
			refused := 0
			for i, lie := range lies() {
				liar.set(func(kind uint16, op *rtrs.Op) int {
					for _, k := range lie.kinds {
						if k == kind {
							copy(op.Data(), lie.data)
							return lie.errno
						}
					}
					return honestAnswer(kind, op)
				})
				if err := try(fmt.Sprint("disk", i)); err != nil {
					refused++
				}
				if gone, err := c.Exited(); gone {
					t.Fatalf("the client ended (%v) at %q", err, lie.name)
				}
			}
			liar.set(honestAnswer)
			if err := try("honest again"); err != nil {
				t.Errorf("after the last lie: %v", err)
			}
			quit.Store(true)
			t.Logf("%d lies, %d maps failed, %d messages; the honest server's device: %s", len(lies()), refused, liar.heard.Load(), figures(<-took))
			if refused < 10 {
				t.Errorf("only %d maps failed", refused)
			}
			eventually(t, enough, "the client holds what it held before", func() bool {
				now := holdingOf(t, c.PID())
				return now.descriptors <= base.descriptors && now.resident <= base.resident+(32<<10)
			})
		})
	}
}

// use writes and reads a device; errors are allowed.
func use(c *lab.Client, name string) {
	n, err := dialDevice(c, name)
	if err != nil {
		return
	}
	defer n.Close()
	if n.Size() < 4096 {
		return
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = n.WriteAt(make([]byte, 4096), 0)
		_, _ = n.ReadAt(make([]byte, 4096), n.Size()-4096)
	}()
	select {
	case <-ended:
	case <-time.After(time.Second):
	}
}
