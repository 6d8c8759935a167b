package server

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
// reads, a CLOSE and a discard are writes; bytes are data and message.
func TestPathStatsOfTheServer(t *testing.T) {
	mem := newMemory()
	mem.add("d", 1<<20)
	r := newRig(t, mem)
	i := r.connect("c")
	_, err := i.sessInfo(2)
	must(t, err)
	dev, err := i.open("d", blk.ReadWrite)
	must(t, err)
	i.rw(dev.DeviceID, blk.Write, 0, make([]byte, 4096))
	i.rw(dev.DeviceID, blk.Read, 0, make([]byte, 512))
	i.bare(dev.DeviceID, blk.Flush, 0, 0, 0, true)
	i.bare(dev.DeviceID, blk.Discard, 0, 0, 4096, false)
	i.bare(dev.DeviceID, blk.WriteZeroes, 0, 0, 4096, false)
	must(t, i.closeDevice(dev.DeviceID))

	api := r.server.Control("test")
	path := r.server.front.Load().rtrs.Sessions()[0].Paths()[0].ID
	got, err := api.PathStats(t.Context(), &controlpb.PathRequest{Session: "c", Id: uint32(path)})
	must(t, err)
	readBytes := uint64(rnbdwire.SessInfoSize + rnbdwire.SessInfoRspSize + rnbdwire.OpenSize + rnbdwire.OpenRspSize +
		512 + rnbdwire.IOSize + rnbdwire.IOSize)
	writeBytes := uint64(4096 + 3*rnbdwire.IOSize + rnbdwire.CloseSize)
	if got.ReadCount != 4 || got.ReadBytes != readBytes || got.WriteCount != 4 || got.WriteBytes != writeBytes || got.Inflight != 0 {
		t.Errorf("%v, want 4 reads of %d bytes, 4 writes of %d", got, readBytes, writeBytes)
	}
	if got.WcTotal < 8 || got.WcCalls == 0 || got.WcMax == 0 {
		t.Errorf("completions: %v", got)
	}
	_, err = api.ResetPathStats(t.Context(), &controlpb.ResetPathStatsRequest{Session: "c", Id: uint32(path), Kind: "rdma"})
	must(t, err)
	got, err = api.PathStats(t.Context(), &controlpb.PathRequest{Session: "c", Id: uint32(path)})
	must(t, err)
	if got.ReadCount+got.ReadBytes+got.WriteCount+got.WriteBytes != 0 || got.WcTotal == 0 {
		t.Errorf("after the reset of rdma: %v", got)
	}
	_, err = api.PathStats(t.Context(), &controlpb.PathRequest{Session: "c", Id: 99})
	_, err2 := api.ResetPathStats(t.Context(), &controlpb.ResetPathStatsRequest{Session: "x", Id: 1, Kind: "all"})
	if !errors.Is(err, syscall.ENOENT) || !errors.Is(err2, syscall.ENOENT) {
		t.Errorf("what is not there: %v, %v", err, err2)
	}
	_, err = api.ResetPathStats(t.Context(), &controlpb.ResetPathStatsRequest{Session: "c", Id: uint32(path), Kind: "0"})
	if !errors.Is(err, syscall.EINVAL) {
		t.Errorf("unknown kind: %v", err)
	}
}

// stage picks the histogram of a stage and an operation.
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

func TestDeviceStatsOfTheServer(t *testing.T) {
	mem := newMemory()
	mem.add("d", 1<<20)
	mem.add("e", 1<<20)
	r := newRig(t, mem)
	i := r.connect("c")
	dev, err := i.open("d", blk.ReadWrite)
	must(t, err)
	_, err = i.open("e", blk.ReadWrite)
	must(t, err)
	for range 5 {
		i.rw(dev.DeviceID, blk.Write, 0, make([]byte, 4096))
	}
	mem.setHold(true)
	late := i.start(true, 512, ioMessage(dev.DeviceID, blk.Read, 0, 0, 512))
	eventually(t, "the plugin has the read", func() bool { return len(mem.requests()) == 6 })
	time.Sleep(30 * time.Millisecond)
	mem.setHold(false)
	i.await(late)

	api := r.server.Control("test")
	var list *controlpb.DeviceStatsList
	eventually(t, "the plugin has counted the read", func() bool { // after its answer
		list, err = api.DeviceStats(t.Context(), &controlpb.DeviceRequest{Device: "d"})
		must(t, err)
		reads := stage(list, "disk", "read")
		return reads.Count() == 1
	})
	if len(list.Devices) != 1 || list.Devices[0].Device != "d" {
		t.Fatalf("asked for d: %v", list)
	}
	for _, s := range []string{"queue", "plugin", "disk"} {
		writes, reads := stage(list, s, "write"), stage(list, s, "read")
		if writes.Count() != 5 || reads.Count() != 1 {
			t.Errorf("stage %s: %d writes and %d reads, want 5 and 1", s, writes.Count(), reads.Count())
		}
		if q := reads.Quantile(1); (s == "queue") != (q < 20*time.Millisecond) {
			t.Errorf("stage %s: the read that the plugin held took %v", s, q)
		}
	}
	list, err = api.DeviceStats(t.Context(), &controlpb.DeviceRequest{})
	must(t, err)
	if len(list.Devices) != 2 || len(list.Devices[1].Stages) != 0 {
		t.Errorf("all devices: %v", list)
	}
	if _, err := api.DeviceStats(t.Context(), &controlpb.DeviceRequest{Device: "x"}); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("unknown device: %v", err)
	}
}

// Levels can be changed by the control API and by files. Both show the same,
// and the plugin gets the level.
func TestLogLevelsOfTheServer(t *testing.T) {
	l := logs.New(slog.DiscardHandler, slog.LevelInfo)
	r := newRig(t, newMemory(), func(cfg *Config) { cfg.Logs = l })
	api := r.server.Control("test")
	reply, err := api.SetLogLevels(t.Context(), &controlpb.SetLogLevelsRequest{Levels: []*controlpb.LogLevel{{Subsystem: "plugins", Level: "error"}}})
	must(t, err)
	got := ""
	for _, v := range reply.Levels {
		got += v.Subsystem + "=" + v.Level + " "
	}
	if got != "plugins=error rtrs=info server=info " {
		t.Errorf("levels %q", got)
	}
	f := ctltree.Find(r.server.Tree()["class/rnbd-server"], "log_level/plugins").(*ctltree.File)
	if text, err := f.Show(); text != "error\n" || err != nil {
		t.Errorf("the file says %q, %v", text, err)
	}
	must(t, f.Store(t.Context(), []byte("info\n")))
	if l.Level("plugins") != slog.LevelInfo {
		t.Error("the file does not change the level")
	}
}
