package server

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// Each refusal has a reason that the client can ask for, and none tells more than the
// client may know.
func TestE060_E061_ReasonsOfRefusedOpens(t *testing.T) {
	mem := newMemory()
	mem.add("a", 1<<20)
	mem.add("immutable", 1<<20)
	mem.setFail("immutable", fmt.Errorf("open /srv/volumes/immutable: %w", syscall.EPERM))
	mem.add("read-only", 1<<20)
	mem.setFail("read-only", fmt.Errorf("the device is read-only: %w", syscall.EACCES))
	r := newRig(t, mem, func(c *Config) { c.SearchPath = "/srv/volumes" })
	_, err := r.connect("first").open("a", blk.ReadWrite)
	must(t, err)
	i := r.connect("second")
	ask := func(name string) (rnbdwire.ReasonFields, error) {
		msg, rsp := make([]byte, rnbdwire.AskReasonSize), make(rnbdwire.Reason, rnbdwire.ReasonSize)
		rnbdwire.PutAskReason(msg, name)
		err := i.session.AdminRead(i.ctx(), msg, rsp)
		return rsp.Fields(), err
	}
	for _, c := range []struct {
		name string
		mode blk.AccessMode
		want blk.Errno
		code uint16
		text string
	}{
		{"a", blk.ReadWrite, blk.EPERM, rnbdwire.ReasonWriter, "another client has it open for writing"},
		{"immutable", blk.ReadWrite, blk.EPERM, rnbdwire.ReasonHost, "open /immutable: operation not permitted"},
		{"read-only", blk.ReadWrite, blk.EACCES, rnbdwire.ReasonHost, "the device is read-only"},
		{"missing", blk.ReadWrite, blk.ENOENT, rnbdwire.ReasonOther, "it exports no such name"},
		{"a", 7, blk.EINVAL, rnbdwire.ReasonOther, "access mode 7 is unknown"},
	} {
		t.Run(fmt.Sprintf("%s %v", c.name, c.mode), func(t *testing.T) {
			if _, err := i.open(c.name, c.mode); blk.ToErrno(err) != c.want {
				t.Fatalf("open: %v, want %v", err, c.want)
			}
			f, err := ask(c.name)
			if err != nil || f.Code != c.code || !strings.Contains(f.Text, c.text) || strings.Contains(f.Text, "/srv/") {
				t.Errorf("reason %+v, error %v; want code %d, %q", f, err, c.code, c.text)
			}
		})
	}
	if _, err := ask("never asked for"); blk.ToErrno(err) != blk.ENOENT {
		t.Errorf("reason of no refusal: %v, want ENOENT", err)
	}
	for n := range 3 * maxReasons {
		i.open(fmt.Sprint("missing ", n), blk.ReadOnly)
	}
	sess, err := r.server.sessionByName("second")
	must(t, err)
	if n := len(sess.reasons.list); n != maxReasons {
		t.Errorf("%d reasons are kept, want %d", n, maxReasons)
	}
}

// An OPEN that took too long says so, also to a client that only looks at the errno.
func TestReasons_OfAnOpenThatTakesTooLong(t *testing.T) {
	ctx, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	for _, c := range []struct {
		err  error
		want blk.Errno
	}{
		{context.DeadlineExceeded, blk.ETIMEDOUT},
		{fmt.Errorf("the plugin did not answer"), blk.ETIMEDOUT},
		{fmt.Errorf("busy: %w", syscall.EBUSY), blk.EBUSY},
		{nil, blk.OK},
	} {
		if got := blk.ToErrno(inTime(ctx, c.err)); got != c.want {
			t.Errorf("%v becomes %v, want %v", c.err, got, c.want)
		}
	}
	if got := reasonOf(inTime(ctx, context.DeadlineExceeded), ""); got.Code != rnbdwire.ReasonTimeout {
		t.Errorf("%+v", got)
	}
}
