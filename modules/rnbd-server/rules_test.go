package server

import (
	"errors"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

func accessRules(t *testing.T, list ...access.Rule) *access.Rules {
	t.Helper()
	r, err := access.New(list)
	must(t, err)
	return r
}

// ruled is a rig with a disk "a/disk" and one "b/disk", and with rules.
func ruled(t *testing.T, list ...access.Rule) *rig {
	mem := newMemory()
	mem.add("a/disk", 1<<20)
	mem.add("b/disk", 1<<20)
	return newRig(t, mem, func(c *Config) { c.Access = accessRules(t, list...) })
}

func TestRules_DecideAtOpen(t *testing.T) {
	r := ruled(t,
		access.Rule{Session: []string{"alice"}, Device: []string{"a/*"}, Allow: "rw"},
		access.Rule{Address: []string{"127.0.0.1"}, Device: []string{"b/*"}, Allow: "ro"})
	alice, bob := r.connect("alice"), r.connect("bob")
	for _, c := range []struct {
		by   *initiator
		name string
		mode blk.AccessMode
		want error
	}{
		{alice, "a/disk", blk.Migration, syscall.EACCES},
		{alice, "a/disk", blk.ReadWrite, nil},
		{alice, "b/disk", blk.ReadWrite, syscall.EACCES},
		{alice, "b/disk", blk.ReadOnly, nil},
		{bob, "a/disk", blk.ReadOnly, syscall.EACCES},
		{bob, "a/none", blk.ReadOnly, syscall.EACCES}, // as where there is one
		{bob, "b/disk", blk.ReadOnly, nil},
		{bob, "b/disk/../../a/disk", blk.ReadOnly, syscall.EACCES},
	} {
		if _, err := c.by.open(c.name, c.mode); !errors.Is(err, c.want) {
			t.Errorf("%s %s: %v, want %v", c.name, c.mode, err, c.want)
		}
	}
}

// A device that a session has open for reading is not given away for writing by
// asking for it once more.
func TestRules_OfANameThatIsOpen(t *testing.T) {
	r := ruled(t, access.Rule{Device: []string{"a/*"}, Allow: "ro"})
	c := r.connect("c")
	_, err := c.open("a/disk", blk.ReadOnly)
	must(t, err)
	if _, err := c.open("a/disk", blk.ReadWrite); !errors.Is(err, syscall.EACCES) {
		t.Errorf("open for writing: %v", err)
	}
}

func (r *rig) openMappings() (n int) {
	for i := range r.server.sessions {
		if s := r.server.sessions[i].Load(); s != nil {
			n += len(s.openMappings())
		}
	}
	return n
}

func TestRules_ThatGoAwayCloseWhatTheyAllowed(t *testing.T) {
	allow := access.Rule{Device: []string{"a/*"}, Allow: "rw"}
	r := ruled(t, allow, access.Rule{Device: []string{"b/*"}, Allow: "rw"})
	c := r.connect("c")
	for _, name := range []string{"a/disk", "b/disk"} {
		_, err := c.open(name, blk.ReadWrite)
		must(t, err)
	}
	r.server.SetAccess(accessRules(t, allow), time.Millisecond)
	soon(t, "b/disk is closed", func() {
		for r.openMappings() > 1 {
			time.Sleep(time.Millisecond)
		}
	})
	if _, err := c.open("b/disk", blk.ReadWrite); !errors.Is(err, syscall.EACCES) {
		t.Errorf("open of what was closed: %v", err)
	}
	r.server.SetAccess(nil, 0)
	if _, err := c.open("b/disk", blk.ReadWrite); err != nil {
		t.Errorf("open without rules: %v", err)
	}
}

// What no rule allows any more stays open, and in use, for the grace time.
func TestRules_GraceTime(t *testing.T) {
	r := ruled(t, access.Rule{Device: []string{"a/*"}, Allow: "rw"})
	c := r.connect("c")
	dev, err := c.open("a/disk", blk.ReadWrite)
	must(t, err)
	r.server.SetAccess(accessRules(t, access.Rule{Allow: "none"}), time.Hour)
	for range 20 {
		time.Sleep(5 * time.Millisecond)
		must(t, c.read(dev.DeviceID, 0).Err())
	}
	if _, err := c.open("a/disk", blk.ReadOnly); !errors.Is(err, syscall.EACCES) {
		t.Errorf("open once more: %v, want EACCES", err)
	}
}

// Rules that come back within the grace time close nothing.
func TestRules_ThatComeBackInTime(t *testing.T) {
	allow := access.Rule{Device: []string{"a/*"}, Allow: "rw"}
	r := ruled(t, allow)
	c := r.connect("c")
	_, err := c.open("a/disk", blk.ReadWrite)
	must(t, err)
	const grace = 50 * time.Millisecond
	r.server.SetAccess(accessRules(t, access.Rule{Allow: "none"}), grace)
	r.server.SetAccess(accessRules(t, allow), grace)
	time.Sleep(3 * grace)
	if n := r.openMappings(); n != 1 {
		t.Errorf("%d devices are open", n)
	}
}

// A path may not join a session if the rules would have forbidden an open
// device from its address.
func TestRules_OfAPathThatJoins(t *testing.T) {
	r := ruled(t, access.Rule{Address: []string{"127.0.0.1", "10.9.1.0/24"}, Device: []string{"a/*"}, Allow: "rw"}, access.Rule{Device: []string{"b/*"}, Allow: "rw"})
	c := r.connect("c")
	_, err := c.open("b/disk", blk.ReadWrite)
	must(t, err)
	other := rtrs.PathAddr{Device: r.clientDevice("c"), Src: netip.MustParseAddr("10.9.0.1"), Dst: r.addr}
	id, err := c.session.AddPath(t.Context(), other)
	must(t, err)
	if _, err := c.open("a/disk", blk.ReadWrite); !errors.Is(err, syscall.EACCES) {
		t.Errorf("open with a path from elsewhere: %v", err)
	}
	must(t, c.session.RemovePath(t.Context(), id))
	soon(t, "the server has closed the path", func() {
		for {
			if _, err := c.open("a/disk", blk.ReadWrite); err == nil {
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	if _, err := c.session.AddPath(t.Context(), other); err == nil {
		t.Error("a path from elsewhere has joined")
	}
	other.Src = netip.MustParseAddr("10.9.1.1")
	if _, err := c.session.AddPath(t.Context(), other); err != nil {
		t.Errorf("a path that is allowed: %v", err)
	}
}

// Paths that join while devices open: in the end no session has a device open that
// it could not open.
func TestRules_OfPathsThatJoinMeanwhile(t *testing.T) {
	r := ruled(t, access.Rule{Address: []string{"127.0.0.1"}, Allow: "rw"})
	for range 20 {
		c := r.connect("c")
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _ = c.session.AddPath(t.Context(), rtrs.PathAddr{Device: r.clientDevice("c"), Src: netip.MustParseAddr("10.9.0.1"), Dst: r.addr})
		})
		wg.Go(func() { _, _ = c.open("a/disk", blk.ReadWrite) })
		wg.Wait()
		if late := r.server.forbiddenMappings(); len(late) > 0 {
			t.Fatalf("%q is open with a path from elsewhere", late[0].name)
		}
		c.close()
	}
}

// A path that is refused keeps the session from nothing that it may do without it.
func TestRules_APathThatIsRefusedDisturbsNoOpen(t *testing.T) {
	r := ruled(t, access.Rule{Address: []string{"127.0.0.1"}, Allow: "rw"})
	c := r.connect("c")
	_, err := c.open("a/disk", blk.ReadWrite)
	must(t, err)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 50 {
			if _, err := c.session.AddPath(t.Context(), rtrs.PathAddr{Device: r.clientDevice("c"), Src: netip.MustParseAddr("10.9.0.1"), Dst: r.addr}); err == nil {
				t.Error("a path from elsewhere has joined")
			}
		}
		close(done)
	})
	for n := 0; ; n++ {
		select {
		case <-done:
			wg.Wait()
			if n == 0 {
				t.Error("no device was opened meanwhile")
			}
			return
		default:
		}
		if _, err := c.open("b/disk", blk.ReadWrite); err != nil { // opened already: asked again
			t.Errorf("open beside a path that is refused: %v", err)
			<-done
			return
		}
	}
}
