package client

import (
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// onceTarget is a target that has FeatureOnce and tells news.
func onceTarget(t *testing.T) *target {
	s := newTarget(t, 1<<20)
	s.set(func() {
		s.features = rnbdwire.FeatureOnce | rnbdwire.FeatureEvents
		s.mark = rnbdwire.Mark{Server: 1, Time: 100}
	})
	return s
}

// lastIO is the message of the last request.
func (s *target) lastIO() []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.users[len(s.users)-1]
}

// loseWhileWriting sends a write, waits until the target has it, has between happen, and
// cuts the session. It returns the write's first message.
func (s *target) loseWhileWriting(d *Device, io *IO, between func()) rnbdwire.IOOnce {
	s.t.Helper()
	s.set(func() { s.hold = true })
	io.Submit(Request{Op: blk.Write, Len: 512})
	io.Flush()
	eventually(s.t, "the server has the write", func() bool { return s.holds() == 1 })
	first := rnbdwire.IOOnce(s.lastIO())
	if between != nil {
		between()
	}
	s.net.RefuseDial(s.addrs[0], syscall.ECONNREFUSED)
	s.net.Cut(s.addrs[0].Addr(), s.net.Conns()[0][0].Addr())
	eventually(s.t, "closed", func() bool { return d.State() == Closed })
	s.releaseAll(blk.OK)
	s.net.RefuseDial(s.addrs[0], nil)
	return first
}

func TestE025_E026_WritesHaveNumbers(t *testing.T) {
	s := onceTarget(t)
	d, io := s.device(s.newClient())
	seen := map[uint64]bool{}
	for _, op := range []blk.Op{blk.Write, blk.Discard, blk.WriteZeroes, blk.Write} {
		if errno := do(t, io, Request{Op: op, Len: 4096}); errno != blk.OK {
			t.Fatalf("%d: errno %d", op, errno)
		}
		m := rnbdwire.IOOnce(s.lastIO())
		if !m.IsValid() || m.IO().Op() != uint8(op) || m.Number() == 0 || seen[m.Number()] {
			t.Errorf("operation %d: message %x, numbers before %v", op, []byte(m), seen)
			continue
		}
		seen[m.Number()] = true
	}
	for _, op := range []blk.Op{blk.Read, blk.Flush} {
		r := Request{Op: op}
		if op == blk.Read {
			r.Len = 512
		}
		do(t, io, r)
		if m := rnbdwire.IO(s.lastIO()); !m.IsValid() || len(m) != rnbdwire.IOSize {
			t.Errorf("operation %d: message %x", op, []byte(m))
		}
	}
	s.set(func() {
		if w := d.session.writer; w == 0 || !slices.Equal(s.writers, []uint64{w, w}) {
			t.Errorf("WRITER of %x, want two of %x", s.writers, w)
		}
		if at := slices.Index(s.log, "writer"); at < 0 || at > slices.Index(s.log, "open vol") {
			t.Errorf("the order of messages: %q", s.log)
		}
	})
}

// A write that is sent again in another session says since when it may have been carried
// out, and whether others may have written.
func TestE028_WritesSayThatTheyWereSentBefore(t *testing.T) {
	for name, c := range map[string]struct {
		change  func(*MapRequest)
		between func(*target, *Device)
		shared  bool
	}{
		"alone": {},
		"another client comes": {between: func(s *target, d *Device) {
			s.tell(rnbdwire.EventRspFields{Kind: rnbdwire.EventShared, Number: 1, DeviceID: d.id.Load(), Sectors: 2048})
			eventually(s.t, "it is asked again", func() bool { return s.count("writer") > 2 })
		}, shared: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := onceTarget(t)
			d, io := s.device(s.newClient(), lossQueue(time.Minute))
			first := s.loseWhileWriting(d, io, func() {
				s.set(func() { s.mark = rnbdwire.Mark{Server: 2, Time: 5} })
				if c.between != nil {
					c.between(s, d)
				}
			})
			var done [1]Done
			eventually(t, "an answer", func() bool { return io.Wait(done[:]) == 1 })
			if done[0].Errno != blk.OK {
				t.Errorf("errno %d", done[0].Errno)
			}
			again := rnbdwire.IOAgain(s.lastIO())
			want := rnbdwire.AgainFields{Since: rnbdwire.Mark{Server: 1, Time: 100}, Shared: c.shared}
			if !again.IsValid() || again.Number() != first.Number() || again.Fields() != want {
				t.Errorf("message %x, fields %+v, want %+v and number %x", []byte(again), again.Fields(), want, first.Number())
			}
			if errno := do(t, io, Request{Op: blk.Write, Len: 512}); errno != blk.OK || !rnbdwire.IOOnce(s.lastIO()).IsValid() {
				t.Errorf("the next write: errno %d, message %x", errno, s.lastIO())
			}
		})
	}
}

// A write that the server does not repeat fails, and the device says why.
func TestE028_WriteThatIsNotRepeatedFails(t *testing.T) {
	s := onceTarget(t)
	d, io := s.device(s.newClient(), lossQueue(time.Minute))
	s.loseWhileWriting(d, io, func() { s.set(func() { s.ioErr = blk.EREMCHG }) })
	var done [1]Done
	eventually(t, "an answer", func() bool { return io.Wait(done[:]) == 1 })
	if done[0].Errno != blk.EIO {
		t.Errorf("errno %d, want EIO", done[0].Errno)
	}
	eventually(t, "the reason", func() bool {
		return strings.Contains(d.describe(plugin.DeviceStatus{}).LastError, "another client may have written")
	})
	if d.State() != Open {
		t.Errorf("state %s", d.State())
	}
}

// While others may write the server is asked again, and no longer.
func TestE027_ServerIsAskedAgainWhileOthersMayWrite(t *testing.T) {
	s := onceTarget(t)
	s.set(func() { s.shared = true })
	d, _ := s.device(s.newClient())
	eventually(t, "it is asked again", func() bool { return s.count("writer") > 2 })
	s.set(func() { s.shared, s.mark.Time = false, 200 })
	eventually(t, "the answer is taken over", func() bool {
		sh := d.writerNotice.Load()
		return sh.mark.Time == 200 && !sh.isShared(d)
	})
	n := s.count("writer")
	time.Sleep(askInterval + askInterval/2)
	if got := s.count("writer"); got != n {
		t.Errorf("asked %d times more", got-n)
	}
}
