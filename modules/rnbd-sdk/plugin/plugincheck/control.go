package plugincheck

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

var controlChecks = []Check{
	{"calls-concurrent", "disks are opened and closed by many callers at once, while requests run", append([]string{"open-reader"}, faithful...), callsConcurrent},
	{"calls-errno", "a call that fails carries an errno", gate, callsErrno},
	{"resize-grown", "ResizeDisk tells the new size of a file that has grown, and requests reach it", faithful, resizeGrown},
	{"stats-counts", "Stats counts the requests that were made", faithful, statsCounts},
	{"stdin-environment", "closed standard input and an unknown environment do not disturb it", gate, environment},
	{"confine-strict", "it works with the rights that a server leaves it", append([]string{"flush-answer"}, faithful...), confineStrict},
}

func callsConcurrent(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	d := h.open(s, false)
	done := make(chan error, 8)
	stop, cancel := context.WithCancel(t.ctx)
	defer cancel()
	var callers sync.WaitGroup
	for i := range 8 {
		callers.Go(func() {
			for n := 0; n < t.rounds(20) && stop.Err() == nil; n++ {
				r, err := h.openAs(stop, uint32(1000+i), s, true)
				if err == nil {
					err = h.p.CloseDisk(stop, r.index)
				}
				if err != nil {
					done <- err
					return
				}
			}
		})
	}
	go func() { callers.Wait(); close(done) }()
	for i := 0; ; i++ {
		d.write(uint64(i%8)*4096, t.random.bytes(4096), 0)
		select {
		case err := <-done:
			if err != nil {
				cancel()
				callers.Wait()
				t.Fatalf("opens and closes of readers at the same time: %v", err)
			}
			return
		default:
		}
	}
}

func callsErrno(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	err := h.try(func(ctx context.Context) error { return h.p.CloseDisk(ctx, 60000) })
	if err == nil {
		t.Fatalf("CloseDisk of a device that is not open succeeds")
	}
	if errno := blk.ToErrno(err); errno != blk.ENODEV {
		t.Fatalf("CloseDisk of a device that is not open has errno %d (%v), want ENODEV in ErrorDetail", errno, err)
	}
}

func resizeGrown(t *T) {
	s := t.plain()
	if s.file == "" || s.path != s.file {
		t.Skipf("the kit cannot make the disk grow")
	}
	h := t.start(s, life{})
	d := h.open(s, false)
	t.must("grow the file", os.Truncate(s.file, 2*diskSize))
	var l blk.Limits
	err := h.try(func(ctx context.Context) (err error) { l, err = h.p.ResizeDisk(ctx, d.index); return err })
	if blk.ToErrno(err) == blk.EOPNOTSUPP {
		t.Skipf("the plugin does not resize")
	}
	t.must("ResizeDisk", err)
	if l.Size != 2*diskSize {
		t.Fatalf("the file has grown to %d bytes, and ResizeDisk says %d", 2*diskSize, l.Size)
	}
	want := t.random.bytes(4096)
	d.write(l.Size-4096, want, 0)
	d.expect("at the new end of the disk", l.Size-4096, want)
}

func statsCounts(t *T) {
	d := t.one()
	for range 50 {
		d.must(shm.SQE{Op: blk.Read, Len: uint32(d.block())})
	}
	reads := func() (n uint64) {
		var resp *pluginpb.StatsResponse
		err := d.h.try(func(ctx context.Context) (err error) {
			resp, err = pluginpb.NewPluginClient(d.h.p.Probe().Conn()).Stats(ctx, &pluginpb.StatsRequest{})
			return err
		})
		if err != nil {
			t.Skipf("the plugin has no Stats: %v", err)
		}
		for _, dev := range resp.GetDevices() {
			for _, op := range dev.GetOps() {
				for _, b := range op.GetBuckets() {
					if dev.GetDevice() == d.index && op.GetOp() == uint32(blk.Read) {
						n += b.GetCount()
					}
				}
			}
		}
		return n
	}
	// A request may be counted shortly after its answer.
	if !within(2*time.Second, func() bool { return reads() == 50 }) {
		t.Fatalf("Stats counts %d reads, and 50 were made", reads())
	}
}

func environment(t *T) {
	if t.o.Backend != nil {
		t.Skipf("needs the plugin as a process")
	}
	p := t.raw("PLUGIN_PROTOCOL_VERSIONS=1", "LANG=xx_XX.nonsense", "RNBD_UNKNOWN=1")
	line, err := p.hello(callTime)
	t.must("the handshake line", err)
	t.must("the handshake line", checkHello(line))
}

func confineStrict(t *T) {
	if t.o.Launcher == nil {
		t.Skipf("the kit was given no launcher for confined plugins")
	}
	s := t.plain()
	h := t.start(s, life{confined: true})
	for _, m := range h.p.Confined().Measures {
		if !m.Holds {
			t.Skipf("this host lacks a measure of confinement: %s: %s", m.Name, m.Text)
		}
	}
	m := newModel(h.open(s, false))
	for range 5 {
		m.step(entries)
	}
	m.d.flush()
	m.verify()
}

var leakChecks = []Check{
	{"leak-descriptors", "descriptors do not grow over opens, closes and arenas", faithful, leakDescriptors},
	{"leak-memory", "memory does not grow over 1,000 opens and 100,000 requests", append([]string{"leak-descriptors"}, faithful...), leakMemory},
	{"leak-threads", "threads do not grow over opens and requests", faithful, leakThreads},
}

// process leaves a check out for a plugin that is no process.
func (t *T) process() {
	if t.o.Backend != nil {
		t.Skipf("needs the plugin as a process")
	}
}

// churn opens and closes the disk n times, with an arena every tenth time.
func (h *host) churn(s *storage, n int) {
	for i := range n {
		d := h.open(s, false)
		if i%10 == 0 {
			d.must(shm.SQE{Op: blk.Read, Len: uint32(d.block())})
			a, err := shm.NewArena("plugin-test", 1<<20)
			h.t.must("arena", err)
			h.call("attach an arena", func(ctx context.Context) error { return h.p.AttachArena(ctx, 50, a) })
			h.call("detach an arena", func(ctx context.Context) error { return h.p.DetachArena(ctx, 50) })
			_ = a.Close()
		}
		d.close()
	}
}

func leakDescriptors(t *T) {
	t.process()
	s := t.plain()
	h := t.start(s, life{})
	count := func() int { return entriesOf(h.p.PID(), "fd") }
	h.churn(s, 20)
	before := count()
	n := max(t.rounds(300), 50)
	h.churn(s, n)
	if !within(2*time.Second, func() bool { return count() < before+n/10 }) {
		t.Fatalf("%d opens and closes left %d descriptors more than the %d before", n, count()-before, before)
	}
}

func entriesOf(pid int, what string) int {
	list, _ := os.ReadDir(fmt.Sprintf("/proc/%d/%s", pid, what))
	return len(list)
}

func leakMemory(t *T) {
	t.process()
	s := t.plain()
	h := t.start(s, life{})
	work := func(opens int) {
		h.churn(s, opens)
		d := h.open(s, false)
		es := make([]shm.SQE, 100*opens)
		for i := range es {
			es[i] = shm.SQE{Op: blk.Read, Len: uint32(d.block())}
		}
		d.all(es)
		d.close()
	}
	work(200)
	before := residentKB(h.p.PID())
	work(max(t.rounds(1000), 200))
	if after := residentKB(h.p.PID()); after > before+before/2+8192 {
		t.Fatalf("the process has %d KiB of memory, %d before 1,000 opens and 100,000 requests", after, before)
	}
}

// residentKB is the anonymous memory of a process in KiB: files that it has mapped, and the
// kit's arenas, are not counted.
func residentKB(pid int) int {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			n, _ := strconv.Atoi(strings.Fields(v)[0])
			return n
		}
	}
	return 0
}

func leakThreads(t *T) {
	t.process()
	s := t.plain()
	h := t.start(s, life{})
	h.churn(s, 50)
	before := entriesOf(h.p.PID(), "task")
	h.churn(s, max(t.rounds(200), 50))
	if after := entriesOf(h.p.PID(), "task"); after > before+20 {
		t.Fatalf("the process has %d threads, %d before 200 opens and closes", after, before)
	}
}

var endChecks = []Check{
	{"end-orderly", "after Drain, Detach and the end of file on descriptor 3 it ends with status 0", gate, endOrderly},
	{"end-detached", "after Detach nothing of the rings is answered", []string{"start-handshake", "end-orderly"}, endDetached},
	{"end-signals", "SIGTERM, SIGINT and SIGHUP under load are ignored: the host ends it", faithful, endSignals},
	{"end-host-idle", "it ends within a second when its host has died", gate, endHostIdle},
	{"end-host-busy", "so it does with requests in flight", append([]string{"end-host-idle"}, faithful...), endHostBusy},
}

func endOrderly(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	d := h.open(s, false)
	d.write(0, t.random.bytes(4096), 0)
	h.ended = true
	defer h.free()
	ctx, cancel := context.WithTimeout(t.ctx, 2*endTime)
	defer cancel()
	start := time.Now()
	if err := h.p.Stop(ctx); err != nil {
		t.Fatalf("orderly end after %v: %v", time.Since(start).Round(time.Millisecond), err)
	}
	if err := h.p.ExitError(); err != nil {
		t.Fatalf("orderly end: %v", err)
	}
}

func endDetached(t *T) {
	d := t.one()
	h := d.h
	h.call("drain", h.p.Drain)
	h.call("detach", func(ctx context.Context) error {
		_, err := pluginpb.NewPluginClient(h.p.Probe().Conn()).Detach(ctx, &pluginpb.DetachRequest{})
		return err
	})
	h.queues[0].post(d.request(shm.SQE{Tag: 1, Op: blk.Read, Len: uint32(d.block())}))
	if n := len(h.queues[0].answers(1, 2*quietTime)); n > 0 {
		t.Fatalf("a request is answered after Detach")
	}
}

func endSignals(t *T) {
	t.process()
	d := t.one()
	group := -d.h.p.PID()
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE} {
		es := make([]shm.SQE, 4*entries)
		for i := range es {
			es[i] = shm.SQE{Op: blk.Read, Len: uint32(d.block())}
		}
		t.must("signal", syscall.Kill(group, sig))
		for _, errno := range d.all(es) {
			if errno != blk.OK {
				t.Fatalf("a read after %v: %v", sig, errno)
			}
		}
		if d.h.awaitEnd(quietTime) {
			t.Fatalf("%v ended it: %v", unix.SignalName(sig), d.h.p.ExitError())
		}
	}
}

// hostGone is how long a plugin may live after its host, with some room for a busy machine.
const hostGone = 2 * time.Second

func endHostIdle(t *T) {
	t.process()
	s := t.plain()
	h := t.start(s, life{})
	h.open(s, false)
	h.hangUp("its host")
}

// hangUp closes the host's end of descriptor 3.
func (h *host) hangUp(who string) {
	pid := h.p.PID()
	alive, err := unix.PidfdOpen(pid, 0)
	h.t.must("watch the process", err)
	defer unix.Close(alive)
	h.p.Probe().HangUp()
	p := []unix.PollFd{{Fd: int32(alive), Events: unix.POLLIN}}
	start := time.Now()
	for time.Since(start) < hostGone {
		if n, _ := unix.Poll(p, 100); n > 0 {
			return
		}
	}
	h.t.Fatalf("%v after the death of %s the process lives", hostGone, who)
}

func endHostBusy(t *T) {
	t.process()
	d := t.one()
	q := d.h.queues[0]
	var es []shm.SQE
	for i := range entries {
		es = append(es, d.request(shm.SQE{Tag: uint64(i), Op: blk.Op(i % 2), Len: 4096, Offset: uint64(i) * 4096, ArenaOff: uint64(i) * 4096}))
	}
	q.post(es...)
	d.h.hangUp("its host with requests in flight")
}
