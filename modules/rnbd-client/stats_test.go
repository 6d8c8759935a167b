package client

import (
	"errors"
	"log/slog"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// In the direction of RTRS an OPEN, a FLUSH and the exchange of versions are
// reads, a discard is a write; bytes are data and message.
func TestPathStatsOfTheClient(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient(noHeartbeats)
	d, io := s.device(c)
	for _, r := range []Request{
		{Op: blk.Write, Len: 4096}, {Op: blk.Read, Len: 512}, {Op: blk.Flush},
		{Op: blk.Discard, Len: 65536}, {Op: blk.WriteZeroes, Len: 65536},
	} {
		if errno := do(t, io, r); errno != blk.OK {
			t.Fatalf("%v: errno %d", r.Op, errno)
		}
	}
	api := c.Control("test")
	ask := &controlpb.PathRequest{Session: d.session.name, Id: 1}
	got, err := api.PathStats(t.Context(), ask)
	must(t, err)
	readBytes := uint64(rnbdwire.SessInfoSize + rnbdwire.SessInfoRspSize + rnbdwire.OpenSize + rnbdwire.OpenRspSize +
		512 + rnbdwire.IOSize + rnbdwire.IOSize)
	if got.ReadCount != 4 || got.ReadBytes != readBytes || got.WriteCount != 3 || got.WriteBytes != 4096+3*rnbdwire.IOSize || got.Inflight != 0 {
		t.Errorf("%v, want 4 reads of %d bytes and 3 writes", got, readBytes)
	}
	var timed, lists uint64
	for _, l := range got.RdmaLat {
		timed += l.Reads + l.Writes
	}
	for _, e := range got.SgEntries {
		for _, n := range e.Counts {
			lists += n
		}
	}
	if timed != 7 || lists != 7 || len(got.RdmaLat) != 18 || got.RdmaLat[3].LimitMs != 8 || got.RdmaLat[17].LimitMs != 0 {
		t.Errorf("%d are timed, %d lists are counted, of 7: %v", timed, lists, got)
	}
	_, err = api.ResetPathStats(t.Context(), &controlpb.ResetPathStatsRequest{Session: ask.Session, Id: 1, Kind: "all"})
	must(t, err)
	got, err = api.PathStats(t.Context(), ask)
	must(t, err)
	if got.ReadCount+got.ReadBytes+got.WriteCount+got.WriteBytes+got.WcTotal+got.RdmaLatMaxReadNs != 0 {
		t.Errorf("after the reset: %v", got)
	}
	_, err = api.PathStats(t.Context(), &controlpb.PathRequest{Session: ask.Session, Id: 9})
	_, err2 := api.ResetPathStats(t.Context(), &controlpb.ResetPathStatsRequest{Session: "x", Id: 1, Kind: "all"})
	if !errors.Is(err, syscall.ENOENT) || !errors.Is(err2, syscall.ENOENT) {
		t.Errorf("what is not there: %v, %v", err, err2)
	}
	if _, err := api.ResetPathStats(t.Context(), &controlpb.ResetPathStatsRequest{Session: ask.Session, Id: 1, Kind: "?"}); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("unknown kind: %v", err)
	}
}

func stage(list *controlpb.DeviceStatsList, stage, op string) latency.Snapshot {
	for _, d := range list.Devices {
		for _, s := range d.Stages {
			if s.Stage == stage && s.Op == op {
				return control.Latency(s.Latency)
			}
		}
	}
	return latency.Snapshot{}
}

func TestDeviceStatsOfTheClient(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	d, io := s.device(c)
	for range 5 {
		do(t, io, Request{Op: blk.Write, Len: 4096})
	}
	s.set(func() { s.hold = true })
	if !io.Submit(Request{Op: blk.Read, Len: 512}) {
		t.Fatal("submit refused")
	}
	io.Flush()
	eventually(t, "the read is there", func() (there bool) { s.set(func() { there = len(s.held) == 1 }); return there })
	time.Sleep(30 * time.Millisecond)
	s.releaseAll(blk.OK)
	var done [1]Done
	io.Wait(done[:])

	api := c.Control("test")
	list, err := api.DeviceStats(t.Context(), &controlpb.DeviceRequest{Device: d.Name()})
	must(t, err)
	for _, name := range []string{"queue", "wire"} {
		writes, reads := stage(list, name, "write"), stage(list, name, "read")
		if writes.Count() != 5 || reads.Count() != 1 {
			t.Errorf("stage %s: %d writes and %d reads, want 5 and 1", name, writes.Count(), reads.Count())
		}
		if q := reads.Quantile(1); (name == "queue") != (q < 20*time.Millisecond) {
			t.Errorf("stage %s: the read that the server held took %v", name, q)
		}
	}
	if _, err := api.DeviceStats(t.Context(), &controlpb.DeviceRequest{Device: "x"}); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("unknown device: %v", err)
	}
}

// A request that waits for a permit waits in the queue, not on the wire.
func TestWaitingForAPermitIsTimeInTheQueue(t *testing.T) {
	s := newTarget(t, 1<<20)
	s.set(func() { s.hold = true })
	c := s.newClient()
	_, io := s.device(c) // 32 slots, 16 permits
	for slot := range 32 {
		if !io.Submit(Request{Op: blk.Write, Slot: slot, Len: 512}) {
			t.Fatal("submit refused")
		}
	}
	io.Flush()
	eventually(t, "all permits are in use", s.busy)
	time.Sleep(30 * time.Millisecond)
	s.releaseAll(blk.OK)
	var done [32]Done
	for got := 0; got < 32; {
		got += io.Wait(done[:])
	}
	list, err := c.Control("test").DeviceStats(t.Context(), &controlpb.DeviceRequest{})
	must(t, err)
	queue := stage(list, "queue", "write")
	if queue.Count() != 32 || queue.Quantile(0.25) > 20*time.Millisecond || queue.Quantile(1) < 20*time.Millisecond {
		t.Errorf("%d waited, the first ones %v, the last ones %v", queue.Count(), queue.Quantile(0.25), queue.Quantile(1))
	}
}

// Levels can be changed by the control API and by files, and both show the
// same. A daemon without loggers of its own has neither.
func TestLogLevelsOfTheClient(t *testing.T) {
	s := newTarget(t, 1<<20)
	l := logs.New(slog.DiscardHandler, slog.LevelInfo)
	c := s.newClient(func(cfg *Config) { cfg.Logs = l })
	s.device(c)
	api := c.Control("test")
	list := func() string {
		t.Helper()
		r, err := api.LogLevels(t.Context(), &controlpb.LogLevelsRequest{})
		must(t, err)
		text := ""
		for _, v := range r.Levels {
			text += v.Subsystem + "=" + v.Level + " "
		}
		return text
	}
	if got := list(); got != "client=info plugins=info rtrs=info " {
		t.Errorf("at first %q", got)
	}
	_, err := api.SetLogLevels(t.Context(), &controlpb.SetLogLevelsRequest{Levels: []*controlpb.LogLevel{{Subsystem: "rtrs", Level: "warn"}}})
	must(t, err)
	f := ctltree.Find(c.Tree()["class/rnbd-client"], "log_level/rtrs").(*ctltree.File)
	if got, err := f.Show(); got != "warn\n" || err != nil {
		t.Errorf("the file says %q, %v", got, err)
	}
	must(t, f.Store(t.Context(), []byte("debug\n")))
	if got := list(); got != "client=info plugins=info rtrs=debug " {
		t.Errorf("at last %q", got)
	}
	plain := s.newClient()
	if _, err := plain.Control("test").LogLevels(t.Context(), &controlpb.LogLevelsRequest{}); !errors.Is(err, syscall.EOPNOTSUPP) {
		t.Errorf("without loggers: %v", err)
	}
	if ctltree.Find(plain.Tree()["class/rnbd-client"], "log_level") != nil {
		t.Error("files of levels that are not there")
	}
}
