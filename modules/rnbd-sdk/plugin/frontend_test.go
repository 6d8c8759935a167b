package plugin

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// testFront reads block 0 of a device into slot 0 whenever somebody asks.
type testFront struct {
	mu       sync.Mutex
	devices  map[uint32]DeviceSpec
	reads    chan shm.SQE
	answers  chan shm.CQE
	listener net.Listener
}

func newTestFront() *testFront {
	return &testFront{devices: map[uint32]DeviceSpec{}, reads: make(chan shm.SQE, 16), answers: make(chan shm.CQE, 16)}
}

func (f *testFront) Describe() Info { return Info{Name: "test", Version: "1"} }

func (f *testFront) AddDevice(_ context.Context, s DeviceSpec) error {
	if s.Config["colour"] == "red" {
		return fmt.Errorf("red: %w", blk.EACCES)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.devices[s.Index] = s
	return nil
}

func (f *testFront) RemoveDevice(_ context.Context, index uint32, force bool) error {
	if !force {
		return fmt.Errorf("%d opener: %w", f.Openers(index), blk.EBUSY)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.devices, index)
	return nil
}

func (f *testFront) ResizeDevice(_ context.Context, index uint32, l blk.Limits) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.devices[index]
	s.Limits = l
	f.devices[index] = s
	return nil
}

func (f *testFront) AddListener(_ context.Context, name string, l *os.File) error {
	if name == "bad" {
		return fmt.Errorf("%s: %w", name, blk.EINVAL)
	}
	defer l.Close()
	var err error
	f.listener, err = net.FileListener(l)
	return err
}

func (f *testFront) Openers(uint32) int           { return 1 }
func (f *testFront) Location(index uint32) string { return fmt.Sprintf("/dev/test%d", index) }

func (f *testFront) Serve(q *FrontQueue) error {
	var cqes [8]shm.CQE
	for !q.Closed() {
		select {
		case e := <-f.reads:
			if !q.Push(&e) {
				return fmt.Errorf("full with %d in flight", q.InFlight())
			}
			q.Publish()
		case <-time.After(time.Millisecond):
		}
		for _, c := range cqes[:q.Pop(cqes[:])] {
			f.answers <- c
		}
	}
	return nil
}

func TestFrontend_LifeOfADevice(t *testing.T) {
	ctx := testContext(t)
	f := newTestFront()
	r := attachT(t, inProcessT(t, f))
	limits := blk.Limits{Size: 1 << 30, LogicalBlockSize: 4096, PhysicalBlockSize: 8192, MaxIOSize: 1 << 20, MaxDiscard: 1 << 20,
		DiscardGranularity: 4096, DiscardAlignment: 4096, MaxWriteZeroes: 1 << 21, MaxSegments: 31,
		SecureErase: true, WriteCache: true, FUA: true, Rotational: true, ReadOnly: true}
	spec := DeviceSpec{Index: 3, Name: "disk", Limits: limits, ArenaID: rigArena, SlotSize: 65536, Slots: 16,
		Generation: 2, Identity: "d-1", Location: "/dev/old", Config: map[string]string{"a": "b"}}
	if err := r.AddDevice(ctx, spec); err != nil {
		t.Fatal(err)
	}
	got := f.devices[3]
	if got.Name != "disk" || got.Limits != limits || got.SlotSize != 65536 || got.Slots != 16 ||
		got.Generation != 2 || got.Config["a"] != "b" || got.Identity != "d-1" || got.Location != "/dev/old" || len(got.Arena) != 1<<20 {
		t.Errorf("spec arrived as %+v", got)
	}

	f.reads <- shm.SQE{Tag: 5, Op: blk.Read, Device: 3, Arena: rigArena, Len: 4096}
	comp := r.ring.Completer()
	var sqe [1]shm.SQE
	if !eventually(func() bool { return comp.Pop(sqe[:]) == 1 }) || sqe[0].Tag != 5 {
		t.Fatalf("request %+v", sqe)
	}
	short, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
	defer cancel()
	if err := r.Drain(short); err == nil {
		t.Error("drained with a request in flight")
	}
	copy(r.mem.Bytes(), "data")
	comp.Push(&shm.CQE{Tag: 5, Errno: uint32(blk.EIO)})
	comp.Publish()
	if c := <-f.answers; c.Tag != 5 || blk.Errno(c.Errno) != blk.EIO || string(got.Arena[:4]) != "data" || fileBegins(t, got.ArenaFD, 4) != "data" {
		t.Errorf("answer %+v", c)
	}

	if n, err := r.Openers(ctx, 3); err != nil || n != 1 {
		t.Errorf("openers %d, %v", n, err)
	}
	if st, err := r.DeviceStatus(ctx, 3); err != nil || st.Location != "/dev/test3" {
		t.Errorf("status %+v, %v", st, err)
	}
	if err := r.ResizeDevice(ctx, 3, blk.Limits{Size: 2 << 30}); err != nil || f.devices[3].Limits.Size != 2<<30 {
		t.Errorf("resize: %v", err)
	}
	if err := r.RemoveDevice(ctx, 3, false); blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("remove while open: %v", err)
	}
	if err := r.DetachArena(ctx, rigArena); blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("arena of a device: %v", err)
	}
	if err := r.RemoveDevice(ctx, 3, true); err != nil {
		t.Errorf("forced remove: %v", err)
	}
	if err := r.DetachArena(ctx, rigArena); err != nil {
		t.Errorf("arena: %v", err)
	}
	if err := r.Stop(ctx); err != nil {
		t.Error(err)
	}
}

func TestFrontend_RefusesDevices(t *testing.T) {
	ctx := testContext(t)
	r := attachT(t, inProcessT(t, newTestFront()))
	good := DeviceSpec{Index: 1, ArenaID: rigArena, SlotSize: 65536, Slots: 16}
	if err := r.AddDevice(ctx, good); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name   string
		change func(*DeviceSpec)
		want   blk.Errno
	}{
		{"index in use", func(s *DeviceSpec) { s.Index = 1 }, blk.EEXIST},
		{"arena that is not attached", func(s *DeviceSpec) { s.ArenaID = 9 }, blk.EINVAL},
		{"more slots than memory", func(s *DeviceSpec) { s.Slots = 17 }, blk.EINVAL},
		{"no slots", func(s *DeviceSpec) { s.Slots = 0 }, blk.EINVAL},
		{"refused by the author", func(s *DeviceSpec) { s.Config = map[string]string{"colour": "red"} }, blk.EACCES},
	} {
		s := good
		s.Index = 2
		test.change(&s)
		if err := r.AddDevice(ctx, s); blk.ToErrno(err) != test.want {
			t.Errorf("%s: %v, want %v", test.name, err, test.want)
		}
	}
	for name, err := range map[string]error{
		"remove": r.RemoveDevice(ctx, 2, true),
		"resize": r.ResizeDevice(ctx, 2, blk.Limits{}),
	} {
		if blk.ToErrno(err) != blk.ENODEV {
			t.Errorf("%s of a device that was refused: %v", name, err)
		}
	}
	if _, err := r.Openers(ctx, 2); blk.ToErrno(err) != blk.ENODEV {
		t.Errorf("openers: %v", err)
	}
}

func TestFrontend_ServesOnAListenerOfTheHost(t *testing.T) {
	ctx := testContext(t)
	f := newTestFront()
	p := inProcessT(t, f)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	file, err := l.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.AddListener(ctx, "bad", file); blk.ToErrno(err) != blk.EINVAL {
		t.Errorf("refused listener: %v", err)
	}
	if err := p.AddListener(ctx, "tcp", file); err != nil {
		t.Fatal(err)
	}
	_, _ = l.Close(), file.Close() // the plugin has its own
	go func() {
		if c, err := f.listener.Accept(); err == nil {
			_, _ = c.Write([]byte("x"))
			_ = c.Close()
		}
	}()
	c, err := net.DialTimeout("tcp", addr, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var b [1]byte
	if _, err := c.Read(b[:]); err != nil || b[0] != 'x' {
		t.Errorf("read %q, %v", b, err)
	}
	_ = f.listener.Close()
}

func TestFrontend_AsProcess(t *testing.T) {
	p := launchT(t, self(t, "front end"))
	if p.Info().Kind != KindFrontend {
		t.Errorf("info %+v", p.Info())
	}
	if err := p.Stop(testContext(t)); err != nil {
		t.Error(err)
	}
}

func fileBegins(t *testing.T, fd, n int) string {
	t.Helper()
	b := make([]byte, n)
	if _, err := unix.Pread(fd, b, 0); err != nil {
		t.Errorf("read the arena's file: %v", err)
	}
	return string(b)
}
