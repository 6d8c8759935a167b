package rtrs

import (
	"errors"
	"reflect"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tally"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

func (c *cltClient) details(id int) PathDetails {
	c.t.Helper()
	d, err := c.PathDetails(id)
	if err != nil {
		c.t.Fatal(err)
	}
	return d
}

func (s *testServer) details(t testing.TB, id int) PathDetails {
	t.Helper()
	d, err := s.Sessions()[0].PathDetails(id)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func sumOf(counts ...uint64) (n uint64) {
	for _, c := range counts {
		n += c
	}
	return n
}

// Bytes are those of data and user message, at both ends; a request without
// data is one as well.
func TestStatsOfBothEndsAgree(t *testing.T) {
	net := loopback.New()
	srv := startServer(t, net, func(op *Op) { op.Respond(0) })
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, nil)
	for i, send := range []func() error{
		func() error { return c.write(0, 0, 0, 4096, "user") },
		func() error { return c.write(0, 1, 0, 512, "user") },
		func() error { return c.write(0, 2, 0, 0, "discard") },
		func() error { return c.read(0, 3, 0, 1024, "user") },
		func() error { return c.read(0, 4, 0, 0, "flush") },
	} {
		if err := send(); err != nil {
			t.Fatal(err)
		}
		c.finished(uint64(i), 0)
	}
	want := PathStats{ReadCount: 2, ReadBytes: 1024 + 4 + 5, WriteCount: 3, WriteBytes: 4096 + 512 + 4 + 4 + 7}
	clt, server := c.details(1), srv.details(t, 1)
	clt.Latency, server.Latency = 0, 0
	if clt.PathStats != want {
		t.Errorf("client: %+v, want %+v", clt.PathStats, want)
	}
	if server.PathStats != want {
		t.Errorf("server: %+v, want %+v", server.PathStats, want)
	}
	if clt.SGEntries[0] != [2]uint64{2, 3} {
		t.Errorf("scatter-gather entries: %v, want 2 without and 3 with data", clt.SGEntries)
	}
	if r, w := sumOf(clt.ReadLatency.Counts[:]...), sumOf(clt.WriteLatency.Counts[:]...); r != 2 || w != 3 {
		t.Errorf("latencies of %d reads and %d writes", r, w)
	}
	if clt.ReadLatency.Max <= 0 || clt.WriteLatency.Max <= 0 {
		t.Errorf("longest: %v and %v", clt.ReadLatency.Max, clt.WriteLatency.Max)
	}
	for name, d := range map[string]*PathDetails{"client": &clt, "server": &server} {
		if n := d.Completions.Total(); n < 5 || d.Completions.Calls() > n || d.Completions.Max() < 1 {
			t.Errorf("%s: %d completions in %d looks, at most %d", name, n, d.Completions.Calls(), d.Completions.Max())
		}
	}
	if clt.CPUMigrationFrom == nil || sumOf(clt.CPUMigrationFrom...) != sumOf(clt.CPUMigrationTo...) {
		t.Errorf("migrations from %v, to %v", clt.CPUMigrationFrom, clt.CPUMigrationTo)
	}
	if server.SGEntries != nil || server.CPUMigrationFrom != nil {
		t.Errorf("the server has counts of a client: %+v", server)
	}
}

func TestStatsAreExactUnderLoad(t *testing.T) {
	net := loopback.New()
	d, srv := serveDisk(t, net, depth(16))
	w, c := openLoad(t, loopbackPaths(net), nil)
	w.start()
	for range 20 {
		w.until(100) // a slow machine takes its time
	}
	w.finish()
	var clt, server PathDetails
	for id := 1; id <= 2; id++ {
		part := c.details(id)
		clt.addCounts(&part)
		part = srv.details(t, id)
		server.addCounts(&part)
	}
	clt.Latency, server.Latency = 0, 0
	if clt.PathStats != server.PathStats || clt.Inflight != 0 {
		t.Errorf("client %+v, server %+v", clt.PathStats, server.PathStats)
	}
	requests := clt.ReadCount + clt.WriteCount
	if runs := d.runs.Load(); requests != uint64(runs) {
		t.Errorf("%d requests are counted, the disk had %d", requests, runs)
	}
	if n := sumOf(clt.ReadLatency.Counts[:]...); n != clt.ReadCount {
		t.Errorf("latencies of %d reads, there were %d", n, clt.ReadCount)
	}
	if n := sumOf(clt.WriteLatency.Counts[:]...); n != clt.WriteCount {
		t.Errorf("latencies of %d writes, there were %d", n, clt.WriteCount)
	}
	var lists uint64
	for _, e := range clt.SGEntries {
		lists += sumOf(e[:]...)
	}
	if lists != requests {
		t.Errorf("scatter-gather lists of %d requests, there were %d", lists, requests)
	}
}

// Counts of both parts of a load that is counted from a reset on add up: none
// is lost, none is counted twice.
func TestResetDuringLoadLosesNothing(t *testing.T) {
	net := loopback.New()
	d, srv := serveDisk(t, net, depth(16))
	w, c := openLoad(t, loopbackPaths(net)[:1], nil)
	w.start()
	w.until(200)
	for range 50 {
		for k := StatRDMA; k <= StatWCCompletion; k <<= 1 {
			if err := c.ResetStats(1, k); err != nil {
				t.Fatal(err)
			}
		}
		if err := srv.Sessions()[0].ResetStats(1, StatAll); err != nil {
			t.Fatal(err)
		}
		for _, d := range []PathDetails{c.details(1), srv.details(t, 1)} {
			if n := d.ReadCount + d.WriteCount + d.Completions.Calls() + sumOf(d.ReadLatency.Counts[:]...); n > 1<<40 {
				t.Fatalf("counts below zero: %+v", d)
			}
		}
	}
	w.finish()
	c.path0(func(p *path) {
		total := p.totalDetails()
		if n := total.ReadCount + total.WriteCount; n != uint64(d.runs.Load()) {
			t.Errorf("%d requests are counted under the resets, the disk had %d", n, d.runs.Load())
		}
		shown := p.currentDetails()
		shown.addCounts(&PathDetails{PathStats: PathStats{ReadCount: p.base.ReadCount, WriteCount: p.base.WriteCount}})
		if shown.ReadCount != total.ReadCount || shown.WriteCount != total.WriteCount {
			t.Errorf("shown %+v, base %+v, total %+v", shown.PathStats, p.base.PathStats, total.PathStats)
		}
	})
}

func (c *cltClient) path0(f func(*path)) {
	p := c.Session.paths[0]
	p.mu.Lock()
	defer p.mu.Unlock()
	f(p)
}

// filled has a count everywhere.
func filled(n uint64) PathDetails {
	d := PathDetails{
		PathStats: PathStats{ReadCount: n, ReadBytes: n, WriteCount: n, WriteBytes: n, Inflight: int64(n),
			Latency: time.Duration(n), Failovers: n, Reconnects: n, ReconnectsFailed: n},
		CPUMigrationFrom: []uint64{n, n}, CPUMigrationTo: []uint64{n, n}, SGEntries: [][2]uint64{{n, n}},
	}
	d.Completions[3] = n
	d.ReadLatency.Counts[2], d.WriteLatency.Counts[2] = n, n
	return d
}

func TestResetIsOfItsKindOnly(t *testing.T) {
	tests := map[string]func(*PathDetails){
		"rdma": func(d *PathDetails) {
			d.ReadCount, d.ReadBytes, d.WriteCount, d.WriteBytes, d.Failovers = 0, 0, 0, 0, 0
		},
		"reconnects":    func(d *PathDetails) { d.Reconnects, d.ReconnectsFailed = 0, 0 },
		"cpu_migration": func(d *PathDetails) { d.CPUMigrationFrom, d.CPUMigrationTo = []uint64{0, 0}, []uint64{0, 0} },
		"sg_entries":    func(d *PathDetails) { d.SGEntries = [][2]uint64{{0, 0}} },
		"rdma_lat":      func(d *PathDetails) { d.ReadLatency, d.WriteLatency = LatencyStats{}, LatencyStats{} },
		"wc_completion": func(d *PathDetails) { d.Completions = CompletionStats{} },
		"all": func(d *PathDetails) {
			*d = PathDetails{PathStats: PathStats{Inflight: d.Inflight, Latency: d.Latency},
				CPUMigrationFrom: []uint64{0, 0}, CPUMigrationTo: []uint64{0, 0}, SGEntries: [][2]uint64{{0, 0}}}
		},
	}
	for name, zero := range tests {
		kind, err := ParseStatKind(name)
		if err != nil {
			t.Fatal(err)
		}
		var base PathDetails
		now := filled(7)
		base.resetKinds(kind, &now)
		shown, want := filled(7), filled(7)
		shown.subtractCounts(&base)
		zero(&want)
		if !reflect.DeepEqual(shown, want) {
			t.Errorf("%s: after the reset %+v, want %+v", name, shown, want)
		}
		later := filled(10)
		later.subtractCounts(&base)
		if kind&StatRDMA != 0 && later.ReadBytes != 3 {
			t.Errorf("%s: 3 bytes later %d are shown", name, later.ReadBytes)
		}
	}
	if _, err := ParseStatKind("rmda"); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("unknown kind: %v", err)
	}
}

func TestStatsOfAPathThatIsNotThere(t *testing.T) {
	net := loopback.New()
	srv := startServer(t, net, serve)
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, nil)
	_, cltErr := c.PathDetails(7)
	_, srvErr := srv.Sessions()[0].PathDetails(7)
	for _, err := range []error{cltErr, srvErr, c.ResetStats(7, StatAll), srv.Sessions()[0].ResetStats(7, StatAll)} {
		if !errors.Is(err, syscall.ENOENT) {
			t.Errorf("%v, want ENOENT", err)
		}
	}
}

// Counts of a path go on over a reconnect; the reconnect is counted, the first
// connection is not.
func TestStatsOutliveAConnection(t *testing.T) {
	net := loopback.New()
	startServer(t, net, func(op *Op) { op.Respond(0) })
	c := cltOpen(t, []PathAddr{pathTo(net.Device("client"), cltA, srvA)}, nil)
	for i := range 2 {
		if err := c.write(0, uint64(i), 0, 512, "user"); err != nil {
			t.Fatal(err)
		}
		c.finished(uint64(i), 0)
		if d := c.details(1); d.Reconnects != uint64(i) {
			t.Errorf("%d reconnects, want %d", d.Reconnects, i)
		}
		if i == 0 {
			if err := c.ReconnectPath(cltContext(t), 1); err != nil {
				t.Fatal(err)
			}
			eventually(t, "session is up", c.Connected)
		}
	}
	if d := c.details(1); d.WriteCount != 2 || d.SGEntries[0] != [2]uint64{0, 2} || sumOf(d.WriteLatency.Counts[:]...) != 2 {
		t.Errorf("after the reconnect: %+v", d)
	}
}

// An answer on another CPU than the request's is one migration, from and to.
func TestMigrationIsCountedByCPU(t *testing.T) {
	net := loopback.New()
	startServer(t, net, serve)
	b := openInline(t, net)
	conn := b.s.links[0].conns[1]
	conn.stats.migratedOff, conn.stats.migratedTo = make([]tally.Count, 4), make([]tally.Count, 4)
	b.p.polls = 1 // no look at the real CPU for the next 1000 polls
	b.p.cpu = 1
	want := b.finished + 1
	if err := b.s.Queue(0).Write(1, b.data, inlineUser[:]); err != nil {
		t.Fatal(err)
	}
	b.p.cpu = 3
	for b.finished < want {
		b.p.Poll()
		b.p.polls = 1
		runtime.Gosched()
	}
	d, err := b.s.PathDetails(1)
	if err != nil {
		t.Fatal(err)
	}
	for cpu, n := range map[int][2]uint64{0: {0, 0}, 1: {1, 0}, 2: {0, 0}, 3: {0, 1}} {
		if d.CPUMigrationFrom[cpu] != n[0] || d.CPUMigrationTo[cpu] != n[1] {
			t.Errorf("CPU %d: from %d, to %d; want %v", cpu, d.CPUMigrationFrom[cpu], d.CPUMigrationTo[cpu], n)
		}
	}
	conn.stats.countMigration(9, 0) // a CPU that came later: not counted, no panic
}

func TestLatencyBuckets(t *testing.T) {
	tests := map[time.Duration]int{
		-1: 0, 0: 0, time.Millisecond - 1: 0, time.Millisecond: 1, 2*time.Millisecond - 1: 1, 2 * time.Millisecond: 2,
		65536*time.Millisecond - 1: 16, 65536 * time.Millisecond: 17, 24 * time.Hour: 17,
	}
	for d, want := range tests {
		var l latencyCounter
		l.addSample(int64(d))
		var s LatencyStats
		s.addCounter(&l)
		if s.Counts[want] != 1 || s.Max != max(d, 0) {
			t.Errorf("%v is counted in %v, longest %v; want bucket %d", d, s.Counts, s.Max, want)
		}
	}
}

func TestLongestAfterAReset(t *testing.T) {
	var l latencyCounter
	show := func(base LatencyStats) (s LatencyStats) {
		s.addCounter(&l)
		s.subtractCounts(&base)
		return s
	}
	l.addSample(int64(100 * time.Millisecond))
	base := show(LatencyStats{})
	if s := show(base); s.Max != 0 {
		t.Errorf("nothing since the reset, longest %v", s.Max)
	}
	l.addSample(int64(3 * time.Millisecond))
	if s := show(base); s.Max != 4*time.Millisecond {
		t.Errorf("3 ms since the reset, longest %v, want the limit of its bucket", s.Max)
	}
	l.addSample(int64(200 * time.Millisecond))
	if s := show(base); s.Max != 200*time.Millisecond {
		t.Errorf("longest %v, want 200 ms", s.Max)
	}
}

// The clock stands still within a turn and goes on in the next.
func TestPollerClock(t *testing.T) {
	p, err := NewPoller(0)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	first := p.Now()
	time.Sleep(time.Millisecond)
	if p.Now() != first {
		t.Error("the clock moved within a turn")
	}
	p.Poll()
	second := p.Now()
	if second < first+int64(time.Millisecond) {
		t.Errorf("%d after %d", second, first)
	}
	time.Sleep(time.Millisecond)
	p.Arm()
	if third := p.Now(); third < second+int64(time.Millisecond) {
		t.Error("the clock stands still over a sleep")
	}
}
