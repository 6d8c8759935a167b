package server

import (
	"errors"
	"math"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Requests do not look at the rules: they are asked when a device is opened and when a
// path joins. So 1,000 rules cost a request nothing.
func TestRules_AreNotAskedForARequest(t *testing.T) {
	var list []access.Rule
	for range 1000 {
		list = append(list, access.Rule{Device: []string{"none/**"}, Allow: "ro"})
	}
	r := ruled(t, append(list, access.Rule{Device: []string{"a/*"}, Allow: "rw", Limits: access.Limits{IOPS: 1e6}})...)
	c := r.connect("c")
	dev, err := c.open("a/disk", blk.ReadWrite)
	must(t, err)
	rules := r.server.rules.Swap(nil) // whoever asks panics
	reads(t, c, dev.DeviceID, 64, 4)
	r.server.rules.Store(rules)
}

func TestBudget_DoesNotAllocate(t *testing.T) {
	b := &budget{}
	b.pace.Store(newPace(access.Limits{IOPS: 1e6, Bytes: 1 << 30, QueueDepth: 10}))
	now := int64(1e15)
	if n := testing.AllocsPerRun(100, func() {
		now += second
		_ = b.dueTime(now)
		b.ops.takeTokens(now, b.pace.Load().op)
		b.bytes.takeTokens(now, b.pace.Load().byteCost(4096))
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A bucket gives its burst at once, and then its rate.
func TestBudget_Rate(t *testing.T) {
	b := &budget{}
	b.pace.Store(newPace(access.Limits{IOPS: 1000, IOPSBurst: 5}))
	start, now, began := int64(1e15), int64(1e15), 0
	for now < start+second {
		if at := b.dueTime(now); at > now {
			now = at
			continue
		}
		b.ops.takeTokens(now, b.pace.Load().op)
		if began++; began == 5 && now != start {
			t.Errorf("the burst ended %v after its begin", time.Duration(now-start))
		}
	}
	if began < 1004 || began > 1006 {
		t.Errorf("%d requests in a second, want the rate of 1000 and the burst of 5", began)
	}
}

// A request that is larger than the burst begins, and those behind it pay for it.
func TestBudget_LargeRequests(t *testing.T) {
	b := &budget{}
	b.pace.Store(newPace(access.Limits{Bytes: 1 << 20, BytesBurst: 4096}))
	now := int64(1e15)
	if b.dueTime(now) > now {
		t.Fatal("the first request waits")
	}
	b.bytes.takeTokens(now, b.pace.Load().byteCost(2<<20))
	if left := time.Duration(b.dueTime(now) - now); left < 1990*time.Millisecond || left > 2*time.Second {
		t.Errorf("2 MiB at 1 MiB a second hold the next request up for %v", left)
	}
	if n := newPace(access.Limits{Bytes: 1}).byteCost(math.MaxUint32); n < 0 {
		t.Errorf("4 GiB at a byte a second cost %d ns", n)
	}
}

// limited is a rig with limits for a/*, and none for b/*.
func limited(t *testing.T, l access.Limits) *rig {
	return ruled(t, access.Rule{Device: []string{"a/*"}, Allow: "rw", Limits: l}, access.Rule{Device: []string{"b/*"}, Allow: "rw"})
}

func TestRules_LimitDevicesAndSessions(t *testing.T) {
	r := limited(t, access.Limits{Devices: 2, Sessions: 1})
	one, two := r.connect("one"), r.connect("two")
	_, err := one.open("a/disk", blk.ReadOnly)
	must(t, err)
	_, err = one.open("a/disk", blk.ReadOnly) // the same device again
	must(t, err)
	if _, err := two.open("a/disk", blk.ReadOnly); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("a second session: %v, want EMFILE", err)
	}
	_, err = two.open("b/disk", blk.ReadWrite)
	must(t, err)
	must(t, r.server.SetLimits(1, access.Limits{Devices: 1}))
	if _, err := two.open("a/disk", blk.ReadOnly); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("a second device: %v, want EMFILE", err)
	}
	must(t, r.server.SetLimits(1, access.Limits{Devices: 2}))
	dev, err := two.open("a/disk", blk.ReadOnly)
	must(t, err)
	_, shares := r.server.ruleUses()
	if s := shares[0]; s.OpenDevices != 2 || s.OpenSessions != 2 {
		t.Errorf("counted: %+v", s)
	}
	must(t, two.closeDevice(dev.DeviceID))
	if _, shares := r.server.ruleUses(); shares[0].OpenDevices != 1 || shares[0].OpenSessions != 1 {
		t.Errorf("counted after a CLOSE: %+v", shares[0])
	}
	r.server.SetAccess(accessRules(t, access.Rule{Allow: "rw", Limits: access.Limits{Devices: 1}}), 0)
	if _, shares := r.server.ruleUses(); shares[0].OpenDevices != 2 || shares[0].OpenSessions != 2 {
		t.Errorf("counted by other rules: %+v", shares[0])
	}
	for _, n := range []int{-1, 0, 2} {
		if err := r.server.SetLimits(n, access.Limits{}); !errors.Is(err, syscall.ENOENT) {
			t.Errorf("rule %d: %v, want ENOENT", n, err)
		}
	}
	if err := r.server.SetLimits(1, access.Limits{IOPS: -1}); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a limit below 0: %v, want EINVAL", err)
	}
}

// read reads 4 KiB to a place that other reads may use as well.
func (i *initiator) read(id uint32, sector uint64) blk.Errno {
	i.t.Helper()
	return i.await(i.start(true, 4096, ioMessage(id, blk.Read, 0, sector, 4096)))
}

// reads sends n reads of 4 KiB, so many at a time, and returns the time that they took.
func reads(t *testing.T, c *initiator, id uint32, n, deep int) time.Duration {
	t.Helper()
	start := time.Now()
	var wg sync.WaitGroup
	for i := range deep {
		wg.Go(func() {
			for range n / deep {
				if errno := c.read(id, uint64(i)*8); errno != blk.OK {
					t.Error(errno)
					return
				}
			}
		})
	}
	wg.Wait()
	return time.Since(start)
}

func TestRules_LimitIOPS(t *testing.T) {
	r := limited(t, access.Limits{IOPS: 200, IOPSBurst: 1})
	c := r.connect("c")
	slow, err := c.open("a/disk", blk.ReadOnly)
	must(t, err)
	free, err := c.open("b/disk", blk.ReadWrite)
	must(t, err)
	done := make(chan time.Duration)
	go func() { done <- reads(t, c, slow.DeviceID, 100, 4) }()
	// A device without a limit goes on beside it, in the same session.
	if took := reads(t, c, free.DeviceID, 100, 1); took > 10*time.Second {
		t.Errorf("100 requests of the other device took %v", took)
	}
	if took := <-done; took < 450*time.Millisecond {
		t.Errorf("100 requests at 200 a second took %v", took)
	}
	_, shares := r.server.ruleUses()
	if shares[0].Waited == 0 || shares[0].Queued != 0 {
		t.Errorf("%+v", shares[0])
	}
}

func TestRules_LimitBytes(t *testing.T) {
	r := limited(t, access.Limits{Bytes: 1 << 20, BytesBurst: 4096})
	c := r.connect("c")
	dev, err := c.open("a/disk", blk.ReadOnly)
	must(t, err)
	if took := reads(t, c, dev.DeviceID, 128, 8); took < 400*time.Millisecond {
		t.Errorf("512 KiB at 1 MiB a second took %v", took)
	}
}

// The pump goes on at once when limits are lifted, by a command or by rules.
func TestRules_LimitsChangeWhileRequestsWait(t *testing.T) {
	for name, lift := range map[string]func(r *rig){
		"by a command": func(r *rig) { must(t, r.server.SetLimits(1, access.Limits{})) },
		"by rules":     func(r *rig) { r.server.SetAccess(accessRules(t, access.Rule{Allow: "rw"}), 0) },
		"by no rules":  func(r *rig) { r.server.SetAccess(nil, 0) },
	} {
		t.Run(name, func(t *testing.T) {
			r := limited(t, access.Limits{Bytes: 1, BytesBurst: 1})
			c := r.connect("c")
			dev, err := c.open("a/disk", blk.ReadOnly)
			must(t, err)
			must(t, c.read(dev.DeviceID, 0).Err()) // owes an hour
			done := make(chan time.Duration)
			go func() { done <- reads(t, c, dev.DeviceID, 16, 4) }()
			eventually(t, "requests wait", func() bool {
				_, shares := r.server.ruleUses()
				return shares[0].Waited >= 4
			})
			lift(r)
			if took := <-done; took > 20*time.Second {
				t.Errorf("it took %v", took)
			}
		})
	}
}

func TestRules_LimitQueueDepth(t *testing.T) {
	mem := newMemory()
	mem.add("a/disk", 1<<20)
	mem.add("a/other", 1<<20)
	mem.hold = true
	r := newRig(t, mem, func(c *Config) {
		c.Access = accessRules(t, access.Rule{Allow: "rw", Limits: access.Limits{QueueDepth: 3}})
	})
	one, two := r.connect("one"), r.connect("two")
	d1, err := one.open("a/disk", blk.ReadOnly)
	must(t, err)
	d2, err := two.open("a/other", blk.ReadOnly)
	must(t, err)
	done := make(chan time.Duration, 2)
	go func() { done <- reads(t, one, d1.DeviceID, 8, 8) }()
	go func() { done <- reads(t, two, d2.DeviceID, 8, 8) }()
	eventually(t, "the plugin has requests, and others wait", func() bool {
		_, shares := r.server.ruleUses()
		mem.mu.Lock()
		defer mem.mu.Unlock()
		return shares[0].Waited >= 10 && len(mem.seen) >= 3
	})
	mem.mu.Lock()
	n := len(mem.seen)
	mem.hold = false
	mem.mu.Unlock()
	if pumps := len(r.server.pumps); n < 3 || n >= 3+pumps {
		t.Errorf("the plugin has %d requests, want 3, and at most one more for each further pump", n)
	}
	<-done
	<-done
	if _, shares := r.server.ruleUses(); shares[0].Queued != 0 {
		t.Errorf("%d requests are counted in plugins", shares[0].Queued)
	}
}

// Devices that share a budget get equal parts, however deep their queues are.
func TestRules_LimitIsFairBetweenDevices(t *testing.T) {
	mem := newMemory()
	mem.add("a/deep", 1<<20)
	mem.add("a/modest", 1<<20)
	r := newRig(t, mem, func(c *Config) {
		c.Pumps = 1
		c.Access = accessRules(t, access.Rule{Allow: "rw", Limits: access.Limits{IOPS: 50, IOPSBurst: 1}})
	})
	deep, modest := r.connect("deep"), r.connect("modest")
	d1, err := deep.open("a/deep", blk.ReadOnly)
	must(t, err)
	d2, err := modest.open("a/modest", blk.ReadOnly)
	must(t, err)
	stop, ended := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for {
			select {
			case <-stop:
				ended <- n
				return
			default:
				reads(t, deep, d1.DeviceID, 12, 12)
				n += 12
			}
		}
	}()
	eventually(t, "the deep device waits", func() bool { _, s := r.server.ruleUses(); return s[0].Waited >= 8 })
	reads(t, modest, d2.DeviceID, 30, 2)
	close(stop)
	if n := <-ended; n > 30*5 {
		t.Errorf("the deep device had %d requests while the modest one had 30", n)
	}
}

// A device that waits for its budget is closed without waiting for it.
func TestRules_LimitDoesNotHoldUpTheEnd(t *testing.T) {
	r := limited(t, access.Limits{Bytes: 1, BytesBurst: 1})
	c := r.connect("c")
	dev, err := c.open("a/disk", blk.ReadOnly)
	must(t, err)
	must(t, c.read(dev.DeviceID, 0).Err())
	done := make(chan blk.Errno, 1)
	go func() { done <- c.read(dev.DeviceID, 0) }()
	eventually(t, "the request waits", func() bool { _, s := r.server.ruleUses(); return s[0].Waited == 1 })
	must(t, c.closeDevice(dev.DeviceID))
	if errno := <-done; errno != blk.OK {
		t.Errorf("the request that waited: %v", errno)
	}
}

func TestOwnersOfNames(t *testing.T) {
	var o sessionOwners
	must(t, o.claim("web", ""))
	must(t, o.claim("web", "alice"))
	must(t, o.claim("web", "alice"))
	for _, id := range []string{"bob", "", "alice2"} {
		if err := o.claim("web", id); !errors.Is(err, syscall.EACCES) {
			t.Errorf("%q: %v, want EACCES", id, err)
		}
	}
	// An identity that uses many names loses its own oldest, and no others'.
	must(t, o.claim("b0", "bob"))
	for i := range maxNames {
		must(t, o.claim(string(rune('A'+i%26))+string(rune(1000+i)), "bob"))
	}
	must(t, o.claim("b0", "carol"))
	if err := o.claim("web", "bob"); !errors.Is(err, syscall.EACCES) {
		t.Errorf("a name of another: %v, want EACCES", err)
	}
	if n := len(o.owner); n > maxNames+2 {
		t.Errorf("%d names are kept", n)
	}
}

func TestIdentityFolders(t *testing.T) {
	for id, want := range map[string]string{
		"psk:tenant-a":         "psk:tenant-a",
		"dns:web.example":      "dns:web.example",
		"spiffe://example/web": "spiffe:%2F%2Fexample%2Fweb",
		"a/../b":               "a%2F..%2Fb",
		"%SESSNAME%":           "%25SESSNAME%25",
		"a%2Fb":                "a%252Fb",
	} {
		if got, err := identityFolder(id); got != want || err != nil {
			t.Errorf("%q: %q, %v, want %q", id, got, err, want)
		}
	}
	for _, id := range []string{"", ".", "..", ".hidden", "a\nb", "a\x00b", "*", "a?", "[a]", "{a}", `a\b`, "\u0085", "\xff", string(make([]byte, 256))} {
		if got, err := identityFolder(id); !errors.Is(err, syscall.EACCES) {
			t.Errorf("%q: %q, %v, want EACCES", id, got, err)
		}
	}
}

func TestJail_Identity(t *testing.T) {
	j := jail{searchPath: "/srv/%IDENTITY%/%SESSNAME%"}
	of, err := j.jailFor("spiffe://x/y")
	must(t, err)
	if root := of.sessionRoot("s"); root != "/srv/spiffe:%2F%2Fx%2Fy/s" {
		t.Errorf("root %s", root)
	}
	if _, err := j.jailFor(""); !errors.Is(err, syscall.EACCES) {
		t.Errorf("no identity: %v, want EACCES", err)
	}
	if of, err := (jail{searchPath: "/srv"}).jailFor("*"); err != nil || of.searchPath != "/srv" {
		t.Errorf("no marker: %v, %v", of, err)
	}
}
