package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// daemon is a client daemon with given objects.
type daemon struct {
	controlpb.UnimplementedClientDaemonServer
	looks    atomic.Int64
	info     controlpb.DaemonInfo
	sessions controlpb.SessionList
	devices  controlpb.ClientDeviceList
	stats    controlpb.DeviceStatsList
	events   controlpb.EventList
	err      error
}

func (d *daemon) Info(context.Context, *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	d.looks.Add(1)
	return &d.info, d.err
}
func (d *daemon) ListSessions(context.Context, *controlpb.ListRequest) (*controlpb.SessionList, error) {
	return &d.sessions, nil
}
func (d *daemon) ListDevices(context.Context, *controlpb.ListRequest) (*controlpb.ClientDeviceList, error) {
	return &d.devices, nil
}
func (d *daemon) DeviceStats(context.Context, *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error) {
	return &d.stats, nil
}
func (d *daemon) Events(context.Context, *controlpb.EventsRequest) (*controlpb.EventList, error) {
	return &d.events, nil
}

// withDevices is a daemon with n open devices.
func withDevices(n int) *daemon {
	d := &daemon{}
	d.info = controlpb.DaemonInfo{Kind: "client", Version: "1.2", Pid: 7, Plugins: []*controlpb.Plugin{{Name: "nbd", Kind: "frontend", State: "running"}}}
	d.sessions.Sessions = []*controlpb.Session{{Name: "s", State: "connected", Hostname: "storage", Devices: uint32(n), Paths: []*controlpb.Path{
		{Session: "s", Id: 1, State: "connected", Fabric: "iwarp", LatencyNs: 250_000},
		{Session: "s", Id: 2, State: "reconnecting", Fabric: "iwarp", LastError: "no route"},
	}}}
	for i := range n {
		name := fmt.Sprint("rnbd", i)
		d.devices.Devices = append(d.devices.Devices, &controlpb.ClientDevice{Name: name, State: "open", Session: "s", Limits: &controlpb.Limits{Size: 1 << 20}})
		d.stats.Devices = append(d.stats.Devices, &controlpb.DeviceStats{Device: name, Stages: []*controlpb.StageStats{
			{Stage: "wire", Op: "read", Latency: &controlpb.Histogram{}}, {Stage: "queue", Op: "read", Latency: &controlpb.Histogram{}},
		}})
	}
	return d
}

// change changes the daemon while the page does not look at it.
func (p *Page) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// answer has device i move data, and answer a request per sector of it.
func (d *daemon) answer(i int, sectors uint64) {
	dev := d.devices.Devices[i]
	dev.RxSectors += sectors
	h := d.stats.Devices[i].Stages[0].Latency
	if len(h.Buckets) == 0 {
		h.Buckets = []*controlpb.HistogramBucket{{UpperNs: 1 << 20}}
	}
	h.Buckets[0].Count += sectors
}

func (p *Page) read(t *testing.T) (s State) {
	t.Helper()
	w := httptest.NewRecorder()
	p.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/status.json", nil))
	if list := regexp.MustCompile(`"(plugins|sessions|paths|devices|events|history|busiest)":null`).FindString(w.Body.String()); list != "" {
		t.Errorf("a list is null: %s", list) // the script would fail
	}
	if err := json.Unmarshal(w.Body.Bytes(), &s); err != nil || w.Code != http.StatusOK {
		t.Fatalf("%d, %v: %s", w.Code, err, w.Body)
	}
	return s
}

func TestRatesAreThoseOfTheLastSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := withDevices(3)
		p := New(Client(d))
		defer p.Close()
		synctest.Wait()
		if s := p.read(t); s.Totals.Read != nil || s.Devices[0].Requests != nil {
			t.Errorf("rates after one look: %v", s.Totals)
		}
		time.Sleep(Interval - time.Second)
		p.change(func() {
			d.answer(1, 100)
			d.devices.Devices[2].State, d.devices.Devices[2].LastError = "closed", "no path is left"
		})
		time.Sleep(2 * time.Second) // a tick, and one
		s := p.read(t)
		if got := *s.Totals.Read; got < 100*512/6.1 || got > 100*512/4.9 {
			t.Errorf("%v bytes a second, want those of 5 or 6 seconds", got)
		}
		if got := *s.Totals.P99; got < 0.001 || got > 0.0011 {
			t.Errorf("p99 %v s, want 1 ms", got)
		}
		var order []string
		for _, one := range s.Devices {
			order = append(order, one.Name)
		}
		if fmt.Sprint(order) != "[rnbd2 rnbd1 rnbd0]" || s.Devices[0].Error != "no path is left" {
			t.Errorf("order of the devices: %v", order)
		}
		if len(s.History) != 1 || len(s.History[0].Busiest) != 1 || s.History[0].Busiest[0] != (Share{"rnbd1", 100 * 512 / 5.}) {
			t.Errorf("history %+v", s.History)
		}
		want := Totals{Devices: 3, DevicesOpen: 2, Sessions: 1, SessionsConnected: 1, Paths: 2, PathsConnected: 1, Plugins: 1, PluginsRunning: 1}
		if s.Totals.Work = (Work{}); s.Totals != want {
			t.Errorf("%+v, want %+v", s.Totals, want)
		}
		if s.Paths[0].ID != 2 || s.Paths[0].Heartbeat != nil || *s.Paths[1].Heartbeat != 0.00025 {
			t.Errorf("paths %+v", s.Paths)
		}
	})
}

// Many readers do not ask the daemon more often than once a second.
func TestReadersShareAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := withDevices(1)
		p := New(Client(d))
		defer p.Close()
		synctest.Wait()
		for range 100 {
			p.read(t)
			time.Sleep(20 * time.Millisecond)
		}
		if n := d.looks.Load(); n > 4 {
			t.Errorf("the daemon was asked %d times in 2 seconds", n)
		}
	})
}

// 20 minutes with 200 busy devices, of which each is the busiest at some time, leaves
// no more than 15 minutes, and eight devices of each interval.
func TestHistoryIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := withDevices(200)
		p := New(Client(d))
		defer p.Close()
		for i := range 240 {
			synctest.Wait()
			p.change(func() {
				for k := range 20 {
					d.answer((20*i+k)%200, uint64(k+1))
				}
			})
			time.Sleep(Interval)
		}
		s := p.read(t)
		if len(s.History) != points || cap(p.history.points[0].Busiest) != maxShares {
			t.Errorf("%d points, %d devices in one", len(s.History), cap(p.history.points[0].Busiest))
		}
		for i, one := range s.History {
			if i > 0 && one.Time-s.History[i-1].Time != Interval.Milliseconds() {
				t.Fatalf("point %d is %d ms after the one before", i, one.Time-s.History[i-1].Time)
			}
		}
		if b := s.History[0].Busiest; len(b) != maxShares || b[0].Rate != 20*512/5. || b[7].Rate != 13*512/5. {
			t.Errorf("busiest: %v", b)
		}
		if n := len(p.answer); n > 1<<18 {
			t.Errorf("an answer has %d bytes", n)
		}
	})
}

// The history of 1,000 busy devices takes less than a megabyte.
func TestHistoryIsSmall(t *testing.T) {
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	d := withDevices(1000)
	c := Client(d)
	before, err := c.look(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for i := range 1000 {
		d.answer(i, uint64(i+1))
	}
	now, err := c.look(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var history ring
	empty := heap()
	for range points {
		history.add(now.point(before))
	}
	if grown := int64(heap()) - int64(empty); grown > 1<<20 || len(history.all()) != points {
		t.Errorf("the history of %d points takes %d bytes", len(history.all()), grown)
	}
}

func TestListsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := withDevices(maxRows + 10)
		d.devices.Devices[maxRows+5].State = "closed"
		for i := range 300 {
			d.events.Events = append(d.events.Events, &controlpb.Event{Number: uint64(i + 1)})
		}
		p := New(Client(d))
		defer p.Close()
		synctest.Wait()
		s := p.read(t)
		if len(s.Devices) != maxRows || s.Totals.Devices != maxRows+10 || s.Devices[0].Name != fmt.Sprint("rnbd", maxRows+5) {
			t.Errorf("%d of %d devices, first %s", len(s.Devices), s.Totals.Devices, s.Devices[0].Name)
		}
		if len(s.Events) != maxEvents || s.Events[0].Number != 300 {
			t.Errorf("%d events, the first is %d", len(s.Events), s.Events[0].Number)
		}
	})
}

func TestADaemonThatDoesNotAnswerIsAProblem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := withDevices(1)
		p := New(Client(d))
		defer p.Close()
		time.Sleep(Interval + time.Second)
		p.change(func() { d.err = errors.New("out of order") })
		time.Sleep(2 * Interval)
		s := p.read(t)
		if s.Problem != "daemon: out of order" || len(s.History) != 1 || s.Daemon != "client" {
			t.Errorf("%+v", s)
		}
		p.change(func() { d.err = nil })
		time.Sleep(Interval)
		if s := p.read(t); s.Problem != "" || len(s.History) != 2 || len(s.Devices) != 1 {
			t.Errorf("%+v", s)
		}
	})
}

// exports is a server daemon with given devices.
type exports struct {
	controlpb.UnimplementedServerDaemonServer
	devices controlpb.ServerDeviceList
}

func (e *exports) Info(context.Context, *controlpb.InfoRequest) (*controlpb.DaemonInfo, error) {
	return &controlpb.DaemonInfo{Kind: "server"}, nil
}
func (e *exports) ListSessions(context.Context, *controlpb.ListRequest) (*controlpb.SessionList, error) {
	return &controlpb.SessionList{}, nil
}
func (e *exports) ListDevices(context.Context, *controlpb.ListRequest) (*controlpb.ServerDeviceList, error) {
	return &e.devices, nil
}
func (e *exports) DeviceStats(context.Context, *controlpb.DeviceRequest) (*controlpb.DeviceStatsList, error) {
	return &controlpb.DeviceStatsList{}, nil
}
func (e *exports) Events(context.Context, *controlpb.EventsRequest) (*controlpb.EventList, error) {
	return nil, errors.New("none")
}

// A user that leaves takes its counts along. That is no work.
func TestUsersOfAnExportComeAndGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hung := []*controlpb.HungRequests{{Stage: "plugin", Count: 2, OldestNs: 5}, {Stage: "queue", Count: 1, OldestNs: 9, Path: "a"}}
		use := func(session string, sectors uint64) *controlpb.ServerDeviceUse {
			return &controlpb.ServerDeviceUse{Session: session, RxSectors: sectors}
		}
		e := &exports{}
		e.devices.Devices = []*controlpb.ServerDevice{
			{Name: "d", Path: "/d", State: "open", Hung: hung, FailedRequests: 1, Users: []*controlpb.ServerDeviceUse{use("b", 1000), use("a", 4000)}},
			{Name: "d", Path: "/d", State: "failed: plugin state lost", Hung: hung, FailedRequests: 2, Users: []*controlpb.ServerDeviceUse{use("a", 0)}},
		}
		p := New(Server(e))
		defer p.Close()
		time.Sleep(time.Second)
		p.change(func() { e.devices.Devices[0].Users = []*controlpb.ServerDeviceUse{use("b", 1010)} })
		time.Sleep(Interval)
		s := p.read(t)
		if len(s.Devices) != 1 {
			t.Fatalf("%d devices", len(s.Devices))
		}
		d := s.Devices[0]
		if *d.Written != 10*512/5. && *d.Written != 10*512/6. || *d.Read != 0 {
			t.Errorf("%v bytes a second written, %v read", *d.Written, *d.Read)
		}
		if d.Work = (Work{}); d != (Device{Name: "d", Path: "/d", Session: "a b", State: "failed", Error: "plugin state lost", Failed: 3, Hung: 3, HungAt: "queue a"}) {
			t.Errorf("%+v", d)
		}
	})
}

// Names are text on the page, whatever they are: its script makes no markup of
// strings, and its policy has the browser refuse it.
func TestThePageCannotRunWhatPeersSend(t *testing.T) {
	script, err := os.ReadFile(filepath.Join("page", "status.js"))
	if err != nil {
		t.Fatal(err)
	}
	if m := regexp.MustCompile(`innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|setHTML|srcdoc|DOMParser|\.on[a-z]+ *=`).Find(script); m != nil {
		t.Errorf("the script uses %s", m)
	}
	p := New(Client(withDevices(1)))
	defer p.Close()
	for path, kind := range map[string]string{"/": "text/html", "/status.css": "text/css", "/status.js": "text/javascript", "/status.json": "application/json"} {
		w := httptest.NewRecorder()
		p.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		h := w.Header()
		if w.Code != http.StatusOK || !strings.HasPrefix(h.Get("Content-Type"), kind) || h.Get("X-Content-Type-Options") != "nosniff" || h.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: %d %v", path, w.Code, h)
		}
		csp := h.Get("Content-Security-Policy")
		for _, part := range []string{"default-src 'none'", "script-src 'self'", "require-trusted-types-for 'script'", "frame-ancestors 'none'"} {
			if !strings.Contains(csp, part) || strings.Contains(csp, "unsafe") {
				t.Errorf("%s: policy %q", path, csp)
			}
		}
		if m := regexp.MustCompile(`https?://|//[a-z]`).FindString(strings.ReplaceAll(w.Body.String(), svgSpace, "")); m != "" && kind != "text/javascript" {
			t.Errorf("%s names another host: %s", path, m)
		}
	}
	for request, want := range map[string]int{"POST /": http.StatusMethodNotAllowed, "GET /status.html": http.StatusNotFound, "GET /page/status.js": http.StatusNotFound} {
		method, path, _ := strings.Cut(request, " ")
		w := httptest.NewRecorder()
		p.Handler().ServeHTTP(w, httptest.NewRequest(method, path, nil))
		if w.Code != want {
			t.Errorf("%s: %d, want %d", request, w.Code, want)
		}
	}
}

// svgSpace is the name of a vocabulary, and no address that is asked.
const svgSpace = "http://www.w3.org/2000/svg"
