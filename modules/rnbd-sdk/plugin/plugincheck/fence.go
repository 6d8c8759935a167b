package plugincheck

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

var fenceChecks = []Check{
	{"fence-open-waits", "Open of a second process waits as long as the first one has the disk open for writing", faithful, fenceOpenWaits},
	{"fence-open-goes-on", "that Open succeeds when the first process has ended", append([]string{"fence-open-waits"}, faithful...), fenceOpenGoesOn},
	{"fence-readers", "Open for reading in a second process does not wait for the writer", append([]string{"open-reader"}, faithful...), fenceReaders},
	{"fence-kill", "after SIGKILL with 30 writes in flight on a slow medium, Open waits until the last of them has ended", append([]string{"fence-open-waits", "fence-open-goes-on"}, faithful...), fenceKill},
	{"fence-late-write", "no write of a killed process reaches the medium after its successor's Open", append([]string{"fence-open-waits", "fence-kill"}, faithful...), fenceLateWrite},
	{"fence-lock", "the fence is a lock of the open file description, at the place that the ABI names", append([]string{"fence-open-waits"}, faithful...), fenceLock},
	{"crash-idle", "after SIGKILL without requests the data that Describe promises are there", append([]string{"open-again", "fence-open-goes-on"}, faithful...), crashIdle},
	{"crash-load", "after SIGKILL under load answered writes are there, others old or new, and a replay of those without answer works", append([]string{"crash-idle", "fence-open-waits"}, faithful...), crashLoad},
}

// fenceTime is how long an Open that must wait is watched.
const fenceTime = 700 * time.Millisecond

// keeps leaves the check out for plugins that promise nothing over a crash, and in process.
func (t *T) keeps() {
	switch {
	case t.o.Backend != nil:
		t.Skipf("needs the plugin as a process")
	case t.info.Crash == plugin.LosesAll:
		t.Skipf("Describe says loses-all: nothing goes on after a crash, so there is no fence")
	}
}

// opening is an Open under way.
type opening struct {
	done   chan struct{}
	d      *disk
	err    error
	cancel context.CancelFunc
}

func (h *host) startOpen(s *storage) *opening {
	ctx, cancel := context.WithCancel(h.t.ctx)
	o := &opening{done: make(chan struct{}), cancel: cancel}
	go func() {
		defer close(o.done)
		o.d, o.err = h.tryOpen(ctx, s, false)
	}()
	return o
}

// returned reports whether Open returns within a time.
func (o *opening) returned(most time.Duration) bool {
	select {
	case <-o.done:
		return true
	case <-time.After(most):
		return false
	}
}

// end gives the Open up.
func (o *opening) end() {
	o.cancel()
	<-o.done
}

// waits ends the check as failed if Open returns with success.
func (o *opening) waits(t *T, while string) {
	if o.returned(fenceTime) && o.err == nil {
		t.Fatalf("Open of a second process returned %s: its writes would meet those of the first", while)
	}
}

// goesOn waits until Open has succeeded.
func (o *opening) goesOn(t *T, after string) *disk {
	if !o.returned(callTime) {
		t.Fatalf("Open of a second process still waits %v %s", callTime, after)
	}
	if o.err != nil {
		t.Fatalf("Open of a second process %s: %v", after, o.err)
	}
	return o.d
}

func fenceOpenWaits(t *T) {
	t.keeps()
	s := t.plain()
	first := t.start(s, life{})
	first.open(s, false)
	second := t.start(s, life{})
	o := second.startOpen(s)
	defer o.end()
	o.waits(t, "while the first has the disk open")
}

func fenceOpenGoesOn(t *T) {
	t.keeps()
	s := t.plain()
	first := t.start(s, life{})
	first.open(s, false)
	second := t.start(s, life{})
	o := second.startOpen(s)
	defer o.end()
	o.returned(quietTime)
	if o.returned(0) && o.err != nil {
		t.Fatalf("Open of a second process fails (%v) in place of waiting", o.err)
	}
	first.end()
	o.goesOn(t, "after the first has ended")
}

func fenceReaders(t *T) {
	t.keeps()
	s := t.plain()
	w := t.start(s, life{}).open(s, false)
	want := t.random.bytes(int(w.block()))
	w.write(0, want, 0)
	w.flush()
	r := t.start(s, life{}).open(s, true)
	r.expect("a reader of a second process", 0, want)
}

// inFlight is the number of writes that are in flight when a process is killed.
const inFlight = 30

// holdWrites makes writes that stay at the medium, and returns their size.
func (d *disk) holdWrites() uint32 {
	n := uint32(max(d.block(), 4096))
	mem := d.h.mem.Bytes()
	var es []shm.SQE
	for i := range inFlight {
		off := uint64(i) * uint64(n)
		for j := range uint64(n) {
			mem[off+j] = 0x11
		}
		es = append(es, d.request(shm.SQE{Tag: uint64(i), Op: blk.Write, Len: n, Offset: off, ArenaOff: off, Flags: d.sure()}))
	}
	m := d.s.medium
	faults := m.Faults()
	faults.HoldWrites = true
	m.Set(faults)
	q := d.h.queues[0]
	q.post(es...)
	if !within(5*time.Second, func() bool { return m.Held() > 0 }) {
		d.h.t.Skipf("none of %d writes reaches the medium before a flush", inFlight)
	}
	within(quietTime, func() bool { return m.Held() >= inFlight })
	return n
}

// sure is the flag that sends a write to the medium at once, where there is one.
func (d *disk) sure() blk.Flags {
	if d.limits.FUA {
		return blk.FUA
	}
	return 0
}

func fenceKill(t *T) {
	t.keeps()
	s := t.onMedium()
	first := t.start(s, life{})
	d := first.open(s, false)
	second := t.start(s, life{})
	d.holdWrites()
	o := second.startOpen(s)
	defer o.end()
	first.kill()
	o.waits(t, fmt.Sprintf("after SIGKILL of the first, while %d of its requests are at the medium", s.medium.Held()))
	s.medium.Release()
	o.goesOn(t, "after the writes of the killed one have ended")
}

func fenceLateWrite(t *T) {
	t.keeps()
	s := t.onMedium()
	for range t.rounds(3) {
		first := t.start(s, life{})
		d := first.open(s, false)
		second := t.start(s, life{})
		n := d.holdWrites()
		first.kill()
		faults := s.medium.Faults()
		faults.HoldWrites, faults.Delay = false, 20*time.Millisecond
		s.medium.Set(faults)
		o := second.startOpen(s)
		defer o.end()
		next := o.goesOn(t, "after SIGKILL of the first")
		s.medium.Release()
		want := t.random.bytes(int(n) * inFlight)
		next.write(0, want, 0)
		next.flush()
		time.Sleep(2 * quietTime)
		if got := s.medium.Bytes(0, len(want)); !bytes.Equal(got, want) {
			if i := differ(got, want); got[i] == 0x11 {
				t.Fatalf("a write of the killed process changed byte %d after its successor had written there", i)
			}
			t.Skipf("the plugin does not write to the file at the offsets of the disk")
		}
		second.end()
		first.end()
	}
}

// fenceBase is the offset of the lock of slot 0 (docs/abi/plugin-v1.md).
const fenceBase = 1 << 62

// fenceLock looks for the lock in /proc/PID/fdinfo.
func fenceLock(t *T) {
	t.keeps()
	if t.info.Names != plugin.NamesPath {
		t.Skipf("a plugin with names of its own may have a fence of its own kind")
	}
	s := t.plain()
	h := t.start(s, life{})
	h.open(s, false)
	locks, err := ofdLocks(h.p.PID(), s.path)
	t.must("read the locks of the plugin", err)
	for _, l := range locks {
		if l.write && (l.start == fenceBase || l.start == fenceBase+1) && l.start == l.end {
			return
		}
	}
	t.Fatalf("no descriptor of %s has a write lock of its open file description on byte 2^62 or the next one; it has %v", filepath.Base(s.path), locks)
}

// ofdLock is a lock of an open file description, on bytes start to end.
type ofdLock struct {
	write      bool
	start, end uint64
}

func ofdLocks(pid int, path string) ([]ofdLock, error) {
	dir := fmt.Sprintf("/proc/%d", pid)
	entries, err := os.ReadDir(dir + "/fd")
	if err != nil {
		return nil, err
	}
	var locks []ofdLock
	for _, e := range entries {
		if target, err := os.Readlink(dir + "/fd/" + e.Name()); err != nil || target != path {
			continue
		}
		info, err := os.ReadFile(dir + "/fdinfo/" + e.Name())
		if err != nil {
			continue // closed meanwhile
		}
		lines := bufio.NewScanner(bytes.NewReader(info))
		for lines.Scan() {
			text, ok := strings.CutPrefix(lines.Text(), "lock:")
			if !ok {
				continue
			}
			var n, p int
			var kind, how, access, inode string
			var l ofdLock
			if _, err := fmt.Sscanf(text, "%d: %s %s %s %d %s %d %d", &n, &kind, &how, &access, &p, &inode, &l.start, &l.end); err == nil && kind == "OFDLCK" {
				l.write = access == "WRITE"
				locks = append(locks, l)
			}
		}
	}
	return locks, nil
}

// successor starts a process after a SIGKILL and opens the disk.
func (t *T) successor(s *storage) *disk {
	h := t.start(s, life{})
	return h.startOpen(s).goesOn(t, "after SIGKILL of the first")
}

func crashIdle(t *T) {
	t.keeps()
	s := t.plain()
	h := t.start(s, life{})
	m := newModel(h.open(s, false))
	for range t.rounds(10) {
		m.step(entries)
	}
	if t.info.Crash == plugin.KeepsFlushed {
		m.d.flush()
	}
	h.kill()
	m.on(t.successor(s)).verify()
}

// crashLoad kills the process with the ring full of writes of single blocks, each with a
// version in its bytes, and replays those without an answer, as a host does.
func crashLoad(t *T) {
	t.keeps()
	s := t.plain()
	const blocks = 64
	version := make([]byte, blocks) // of the last answered write
	var d *disk
	h := t.start(s, life{})
	d = h.open(s, false)
	b := int(d.block())
	d.write(0, make([]byte, blocks*b), 0)
	d.flush()
	for life := range t.rounds(5) + 1 {
		h, q := d.h, d.h.queues[0]
		next := byte(2*life + 1)
		var es []shm.SQE
		for i := range blocks {
			for j := range b {
				h.mem.Bytes()[i*b+j] = next
			}
			es = append(es, d.request(shm.SQE{Tag: uint64(i), Op: blk.Write, Len: uint32(b), Offset: uint64(i * b), ArenaOff: uint64(i * b)}))
		}
		q.post(es...)
		answered := q.answers(t.random.IntN(blocks/2), time.Second)
		h.kill()
		if !h.awaitEnd(callTime) {
			t.Fatalf("the killed process has not ended after %v", callTime)
		}
		answered = append(answered, q.answers(blocks, 0)...)
		var replay []shm.SQE
		done := map[uint64]bool{}
		for _, c := range answered {
			done[c.Tag] = true
			version[c.Tag] = next
		}
		d = t.successor(s)
		if t.info.Crash == plugin.KeepsAcknowledged {
			for i := range blocks {
				got := d.read(uint64(i*b), b)
				if done[uint64(i)] && (got[0] != next || got[b-1] != next) || got[0] != got[b-1] || got[0] != next && got[0] != version[i] {
					t.Fatalf("block %d has bytes %d and %d after a SIGKILL; the last answered write has %d, one without answer %d",
						i, got[0], got[b-1], version[i], next)
				}
				if !done[uint64(i)] {
					replay = append(replay, es[i])
				}
			}
		}
		copy(d.h.mem.Bytes(), bytes.Repeat([]byte{next}, blocks*b))
		for i, errno := range d.all(replay) {
			if errno != blk.OK {
				t.Fatalf("replay of a write without answer, tag %d: %v", i, errno)
			}
		}
		for i := range version {
			version[i] = next
		}
		if t.info.Crash == plugin.KeepsAcknowledged {
			d.expect("after a replay", 0, bytes.Repeat([]byte{next}, blocks*b))
		} else {
			d.write(0, bytes.Repeat([]byte{next}, blocks*b), 0)
			d.flush()
		}
	}
}
