package plugin

import (
	"context"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// A request takes from the look that found it to the publication of its answer.
func TestQueue_TimesRequests(t *testing.T) {
	const n = popBatch + 10 // more than are noted at once
	b := newBench(t, 128)
	now := int64(1000)
	b.UseClock(func() int64 { return now })
	b.fresh = b.now
	for tag := range uint64(n) {
		b.s.Push(&shm.SQE{Tag: tag, Op: blk.Read, Device: 1, Arena: 1, Len: 512})
	}
	b.s.Push(&shm.SQE{Tag: n, Op: blk.Flush, Device: 1})
	b.s.Push(&shm.SQE{Tag: n + 1, Op: blk.Flush, Device: 5}) // refused: not counted
	b.s.Publish()
	var reqs [128]Request
	got := b.Next(reqs[:])
	if got != n+1 {
		t.Fatalf("%d requests", got)
	}
	now = 4000
	for _, r := range reqs[:got] {
		b.Complete(r.Tag, blk.EIO)
	}
	b.Publish()
	stats := &b.disks.get(1).root.stats.queues[0]
	reads, flushes := stats[latency.IndexOf(blk.Read)].Snapshot(), stats[latency.IndexOf(blk.Flush)].Snapshot()
	if reads.Count() != n || reads.Sum != n*3000 || flushes.Count() != 1 || flushes.Sum != 3000 {
		t.Errorf("reads %+v, flushes %+v", reads, flushes)
	}
}

// A host may attach more queues than it announced.
func TestQueue_BeyondTheAnnouncedIsNotTimed(t *testing.T) {
	b := newBench(t, 4)
	b.Queue.pump = 7
	b.s.Push(&shm.SQE{Tag: 1, Op: blk.Flush, Device: 1})
	b.s.Publish()
	var reqs [4]Request
	if b.Next(reqs[:]) != 1 {
		t.Fatal("no request")
	}
	b.Complete(reqs[0].Tag, blk.OK)
	b.Publish()
	var c [4]shm.CQE
	if b.s.Pop(c[:]) != 1 {
		t.Error("no answer")
	}
}

func TestProcess_Stats(t *testing.T) {
	ctx := testContext(t)
	r := attachT(t, launchT(t, self(t, "memory")))
	if _, err := r.OpenDisk(ctx, OpenRequest{Device: 9, Name: "d"}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		r.submit(shm.SQE{Op: blk.Write, Device: 9, Arena: rigArena, Len: 512})
		r.answer()
	}
	r.submit(shm.SQE{Op: blk.Read, Device: 9, Arena: rigArena, Len: 512})
	r.answer()
	// An answer is counted right after it is published.
	var stats map[uint32]*latency.Snapshots
	if !eventually(func() bool {
		var err error
		if stats, err = r.Stats(ctx); err != nil {
			t.Fatal(err)
		}
		return stats[9] != nil && stats[9][latency.IndexOf(blk.Read)].Count() == 1
	}) {
		t.Fatal("the read is not counted")
	}
	if w := stats[9][latency.IndexOf(blk.Write)]; len(stats) != 1 || w.Count() != 3 || w.Sum == 0 {
		t.Errorf("%d devices, writes %+v", len(stats), w)
	}
	if err := r.CloseDisk(ctx, 9); err != nil {
		t.Fatal(err)
	}
	if stats, err := r.Stats(ctx); err != nil || len(stats) != 0 {
		t.Errorf("after the close: %v, %v", stats, err)
	}
	if err := r.Stop(ctx); err != nil {
		t.Error(err)
	}
	r.close()
}

// A plugin from before these calls has no statistics and keeps its log level.
// That is no error.
func TestProcess_StatsAndLogOfAnOldPlugin(t *testing.T) {
	path := filepath.Join(t.TempDir(), "old.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer()
	pluginpb.RegisterPluginServer(g, pluginpb.UnimplementedPluginServer{})
	go func() { _ = g.Serve(l) }()
	defer g.Stop()
	link, err := grpc.NewClient("unix:"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	p := newProcess(Config{Name: "old"}, nil, link)
	if stats, err := p.Stats(testContext(t)); stats != nil || err != nil {
		t.Errorf("%v, %v", stats, err)
	}
	if err := p.SetLog(testContext(t), slog.LevelDebug); err != nil {
		t.Error(err)
	}
}

func TestSetLog(t *testing.T) {
	defer logLevel.Set(logLevel.Level())
	s := &server{}
	var out strings.Builder
	log := newLogger(&out)
	for _, level := range []string{"warn", "debug"} {
		if _, err := s.SetLog(t.Context(), &pluginpb.SetLogRequest{Level: level}); err != nil {
			t.Fatal(err)
		}
		log.Debug("at " + level)
	}
	if _, err := s.SetLog(t.Context(), &pluginpb.SetLogRequest{Level: "loud"}); errnoOf(err) != blk.EINVAL {
		t.Errorf("unknown level: %v", err)
	}
	if got := out.String(); strings.Contains(got, "at warn") || !strings.Contains(got, "at debug") {
		t.Errorf("logged: %s", got)
	}
}

func TestFrontQueue_Served(t *testing.T) {
	ring, err := shm.NewHeapRing(4)
	if err != nil {
		t.Fatal(err)
	}
	defer ring.Close()
	s := &frontServer{server: &server{pumps: 2}}
	q, beyond := newFrontQueue(1, ring, &s.stats), newFrontQueue(2, ring, &s.stats)
	if err := s.stats.add(3, new(s.newStats())); err != nil {
		t.Fatal(err)
	}
	q.Served(3, blk.Write, 500)
	q.Served(3, blk.Op(77), 500)
	q.Served(4, blk.Write, 500)
	beyond.Served(3, blk.Write, 500)
	s.kind = s
	resp, err := s.Stats(context.Background(), nil)
	if err != nil || len(resp.Devices) != 1 {
		t.Fatalf("%v, %v", resp, err)
	}
	got := latencyFromPB(resp.Devices[0])
	for i := range got {
		want := uint64(0)
		if latency.OpAt(i) == blk.Write {
			want = 1
		}
		if n := got[i].Count(); n != want {
			t.Errorf("%d of operation %v, want %d", n, latency.OpAt(i), want)
		}
	}
}

// A plugin's report is foreign: any numbers are taken, none is trusted.
func TestStatsOfAStrangePlugin(t *testing.T) {
	got := latencyFromPB(&pluginpb.DeviceLatency{Ops: []*pluginpb.OpLatency{
		{Op: 1 << 8, Buckets: []*pluginpb.LatencyBucket{{UpperNs: 1, Count: 1}}},
		{Op: 99, Buckets: []*pluginpb.LatencyBucket{{UpperNs: 1, Count: 1}}},
		nil,
		{Op: 0, SumNs: 30, Buckets: []*pluginpb.LatencyBucket{{UpperNs: 20, Count: 1}, nil, {UpperNs: 10, Count: 2}, {UpperNs: 20, Count: 1}}},
	}})
	reads := got[latency.IndexOf(blk.Read)]
	want := []latency.Bucket{{Upper: 0}, {Upper: 10, Count: 2}, {Upper: 20, Count: 2}}
	if len(reads.Buckets) != 3 || reads.Buckets[0] != want[0] || reads.Buckets[1] != want[1] || reads.Buckets[2] != want[2] {
		t.Errorf("%+v, want %v", reads, want)
	}
	for i := range got {
		if latency.OpAt(i) != blk.Read && got[i].Count() > 0 {
			t.Errorf("operation %v was counted", latency.OpAt(i))
		}
	}
}
