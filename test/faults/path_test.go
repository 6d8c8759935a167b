package faults

import (
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// paths is a rig with one session; its first path goes through a proxy.
type paths struct {
	t       *testing.T
	lab     *lab.T
	server  *lab.Server
	client  *lab.Client
	proxy   *proxy
	session string
	device  string
}

// newPaths maps a device over the proxy to the server's first address and, if
// second is set, over its second too.
func newPaths(t *testing.T, o lab.ServerOptions, device string, second bool, change ...func(*controlpb.MapRequest)) *paths {
	t.Helper()
	p := &paths{t: t, lab: lab.New(t)}
	if o.SearchPath == "" && len(o.Plugins) == 0 {
		o.SearchPath, o.Plugins = p.lab.Image(device, 64<<20), []string{"fileio"}
	}
	o.Addrs = []string{"127.0.0.1", "127.0.0.2"}
	p.server = p.lab.Server(o)
	p.client = p.lab.Client(lab.ClientOptions{})
	p.proxy = newProxy(t, p.server.Addrs[0])
	d := p.lab.Map(p.client, device, p.server, func(r *controlpb.MapRequest) {
		if r.Paths = []string{p.proxy.addr}; second {
			r.Paths = append(r.Paths, p.server.Addrs[1])
		}
		r.Loss = "queue:30s" // a busy machine may miss the heartbeats of the only path
		for _, f := range change {
			f(r)
		}
	})
	p.session, p.device = d.Session, d.Name
	return p
}

func (p *paths) list() []*controlpb.Path {
	p.t.Helper()
	l, err := p.client.API.ListSessions(p.t.Context(), &controlpb.ListRequest{})
	if err != nil || len(l.Sessions) != 1 {
		p.t.Fatalf("sessions: %v, %v", l, err)
	}
	return l.Sessions[0].Paths
}

// to returns the path to an address; nil: there is none.
func (p *paths) to(addr string) *controlpb.Path {
	p.t.Helper()
	for _, path := range p.list() {
		if path.Dst == addr {
			return path
		}
	}
	return nil
}

func (p *paths) awaitState(addr, state string) {
	p.t.Helper()
	eventually(p.t, 2*enough, "path to "+addr+" is "+state, func() bool {
		path := p.to(addr)
		return path != nil && path.State == state
	})
}

// change is one of the calls that take a path.
func (p *paths) change(what string, addr string) {
	p.t.Helper()
	var err error
	api, ctx := p.client.API, p.t.Context()
	r := &controlpb.PathRequest{Session: p.session}
	if path := p.to(addr); path != nil {
		r.Id = path.Id
	} else if what != "add" {
		p.t.Fatalf("there is no path to %s", addr)
	}
	switch what {
	case "add":
		add := &controlpb.AddPathRequest{Session: p.session, Path: addr}
		for deadline := time.Now().Add(enough); ; time.Sleep(20 * time.Millisecond) {
			// The server may still be closing a path between the same addresses.
			if _, err = api.AddPath(ctx, add); err == nil || !strings.Contains(err.Error(), "file exists") || time.Now().After(deadline) {
				break
			}
		}
	case "remove":
		r.Force = true
		_, err = api.RemovePath(ctx, r)
	case "disconnect":
		_, err = api.DisconnectPath(ctx, r)
	case "reconnect":
		_, err = api.ReconnectPath(ctx, r)
	}
	if err != nil {
		p.t.Fatalf("%s path to %s: %v", what, addr, err)
	}
}

func (p *paths) policy(name string) {
	p.t.Helper()
	if _, err := p.client.API.SetPolicy(p.t.Context(), &controlpb.SetPolicyRequest{Session: p.session, Policy: name}); err != nil {
		p.t.Fatal(err)
	}
}

var policies = []string{"min-inflight", "round-robin", "min-latency"}

// TestPathsComeAndGoUnderLoad does everything with paths that a user can do,
// under each policy, below a fio that verifies.
func TestPathsComeAndGoUnderLoad(t *testing.T) {
	p := newPaths(t, lab.ServerOptions{}, "disk.img", false)
	first, second := p.proxy.addr, p.server.Addrs[1]
	start := func() *fioRun {
		return startFio(t, time.Duration(pick(6, 60))*time.Second, "64m", "16m", p.client.URI(p.device))
	}
	f := start()
	rounds, requests := 0, int64(0)
	for ; rounds < len(policies) || f.running(); rounds++ {
		if !f.running() { // the machine is slow
			requests += f.wait().Requests
			f = start()
		}
		p.policy(policies[rounds%len(policies)])
		for _, step := range []struct{ what, addr string }{
			{"add", second}, {"disconnect", first}, {"reconnect", first}, {"disconnect", second},
			{"reconnect", second}, {"reconnect", second}, {"remove", second},
		} {
			p.change(step.what, step.addr)
			time.Sleep(50 * time.Millisecond)
		}
		if left := p.list(); len(left) != 1 || left[0].State != "connected" {
			t.Fatalf("after a round the paths are %v", left)
		}
	}
	r := f.wait()
	t.Logf("%d rounds of 7 changes below %d verified requests, fio's longest %v", rounds, requests+r.Requests, r.Longest.Round(time.Millisecond))
}

// TestACutPathIsLeftAtOnce resets one of two paths again and again.
func TestACutPathIsLeftAtOnce(t *testing.T) {
	p := newPaths(t, lab.ServerOptions{}, "disk.img", true)
	w := startLoad(t, p.client, p.device, loadOptions{})
	var pauses []time.Duration
	for range pick(6, 60) {
		p.awaitState(p.proxy.addr, "connected")
		w.awaitProgress(100)
		at := time.Now()
		p.proxy.cut()
		w.awaitProgress(200)
		pauses = append(pauses, w.pause(at))
	}
	w.stop()
	t.Logf("pauses by cut paths: %s", figures(pauses))
	for _, pause := range pauses {
		if pause > maxPause() {
			t.Errorf("a request had to wait %v", pause)
		}
	}
}

// TestAStalledPathIsNoticedByItsHeartbeat stalls one of two paths without a
// word, under each policy.
func TestAStalledPathIsNoticedByItsHeartbeat(t *testing.T) {
	for _, policy := range policies {
		t.Run(policy, func(t *testing.T) {
			t.Parallel() // it is waiting, mostly
			p := newPaths(t, lab.ServerOptions{}, "disk.img", true)
			p.policy(policy)
			w := startLoad(t, p.client, p.device, loadOptions{workers: 8})
			w.awaitProgress(200)
			at := time.Now()
			p.proxy.hold()
			eventually(t, enough, "the stalled path is given up", func() bool {
				return p.to(p.proxy.addr).State != "connected"
			})
			noticed := time.Since(at)
			w.awaitProgress(200)
			pause := w.pause(at)
			if pause > noticed+5*time.Second {
				t.Errorf("a request had to wait %v", pause)
			}
			p.proxy.release()
			p.awaitState(p.proxy.addr, "connected")
			w.awaitProgress(200)
			w.stop()
			t.Logf("noticed after %v, the longest request took %v", noticed.Round(time.Millisecond), pause.Round(time.Millisecond))
		})
	}
}
