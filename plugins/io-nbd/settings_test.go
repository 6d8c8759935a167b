package main

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

func TestSettings(t *testing.T) {
	for _, c := range []struct {
		in     string // key=value, separated by ;
		crash  plugin.CrashClass
		device string // the name of a device
		export string
		text   string // of the error
	}{
		{in: "uri=nbd://h/x", crash: plugin.KeepsFlushed, device: "d", export: "x"},
		{in: "uri=nbd://h", crash: plugin.KeepsFlushed, device: "d", export: "d"},
		{in: "uri=nbd://h/x;export=*", crash: plugin.KeepsFlushed, device: "d", export: "d"},
		{in: "uri=nbd://h;export=", crash: plugin.KeepsFlushed, device: "d", export: ""},
		{in: "uri=nbd://h;replay=unsafe", crash: plugin.KeepsAcknowledged, device: "d", export: "d"},
		{in: "run=nbdkit x;lock=/x", crash: plugin.KeepsFlushed, device: "d", export: ""},
		{in: "run=nbdkit x;lock=/x;keeps=acknowledged", crash: plugin.KeepsAcknowledged},
		{in: "run=nbdkit x;lock=/x;keeps=nothing", crash: plugin.LosesAll},
		{in: "run=qsd $socket;lock=/x;export=*", crash: plugin.KeepsFlushed, device: "d", export: "d"},
		{in: "", text: "uri"},
		{in: "uri=http://h/x", text: "no address"},
		{in: "uri=nbd://h;run=x;lock=/x", text: "either"},
		{in: "uri=nbd://h;lock=/x", text: "lock"},
		{in: "uri=nbd://h;keeps=flushed", text: "keeps"},
		{in: "run=nbdkit x", text: "lock"},
		{in: "run=nbdkit x;lock=x", text: "absolute"},
		{in: "run=nbdkit x;lock=/x;replay=unsafe", text: "replay"},
		{in: "run=qemu-nbd x;lock=/x", text: "$socket"},
		{in: "uri=nbd://h;connections=0", text: "connections"},
		{in: "uri=nbd://h;reconnect=1", text: "reconnect"},
		{in: "uri=nbd://h;replay=yes", text: "replay"},
		{in: "uri=nbd://h;speed=1", text: "speed"},
	} {
		in := map[string]string{}
		for _, kv := range strings.Split(c.in, ";") {
			if k, v, ok := strings.Cut(kv, "="); ok {
				in[k] = v
			}
		}
		s, err := parseSettings(in)
		if c.text != "" {
			if err == nil || !strings.Contains(err.Error(), c.text) || !errors.Is(err, blk.EINVAL) {
				t.Errorf("%s: error %v", c.in, err)
			}
			continue
		}
		if err != nil || s.crash != c.crash || s.exportOf(c.device) != c.export {
			t.Errorf("%s: %v, %v, export %q", c.in, err, s.crash, s.exportOf(c.device))
		}
	}
}

func TestLimits(t *testing.T) {
	const all = allFlags
	for _, c := range []struct {
		name string
		e    nbdwire.Export
		want blk.Limits // Size 0: an error
	}{
		{"a server that tells no blocks", nbdwire.Export{Size: 1<<20 + 100, Flags: all, MinBlock: 1, PreferredBlock: 4096, MaxPayload: 32 << 20},
			blk.Limits{Size: 1 << 20, LogicalBlockSize: 512, PhysicalBlockSize: 4096, MaxIOSize: 32 << 20, MaxDiscard: maxRange,
				DiscardGranularity: 4096, MaxWriteZeroes: maxRange, WriteCache: true, FUA: true}},
		{"a read-only export", nbdwire.Export{Size: 1 << 20, Flags: all | nbdwire.ReadOnly, MinBlock: 1024, PreferredBlock: 3000, MaxPayload: 5000},
			blk.Limits{Size: 1 << 20, LogicalBlockSize: 1024, PhysicalBlockSize: 1024, MaxIOSize: 4096, WriteCache: true, FUA: true, ReadOnly: true}},
		{"blocks of 64 KiB", nbdwire.Export{Size: 1 << 20, Flags: all, MinBlock: 65536, PreferredBlock: 65536, MaxPayload: 1 << 20}, blk.Limits{}},
		{"less than a block", nbdwire.Export{Size: 100, Flags: all, MinBlock: 1, MaxPayload: 1 << 20}, blk.Limits{}},
		{"more than an offset", nbdwire.Export{Size: 1 << 63, Flags: all, MinBlock: 1, MaxPayload: 1 << 20}, blk.Limits{}},
	} {
		if l, err := limitsOf(&c.e, false); l != c.want || (err == nil) != (c.want.Size != 0) {
			t.Errorf("%s: %+v, %v", c.name, l, err)
		}
	}
}

func TestAllocation(t *testing.T) {
	entries := func(all ...uint32) (b []byte) {
		for _, n := range all {
			b = append(b, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
		}
		return b
	}
	const hole, data, zero = 3, 0, 2
	for _, c := range []struct {
		name            string
		entries         []byte
		start, off, end uint64
		want            []extents.Extent
	}{
		{"a hole between data", entries(512, data, 1024, hole, 512, data), 0, 0, 2048, []extents.Extent{{Len: 512}, {Len: 1024, Hole: true}, {Len: 512}}},
		{"zeroes that are allocated are data", entries(512, zero), 0, 0, 512, []extents.Extent{{Len: 512}}},
		{"bounds within sectors", entries(100, data, 1500, hole, 448, data), 0, 0, 2048, []extents.Extent{{Len: 512}, {Len: 1024, Hole: true}, {Len: 512}}},
		{"a hole within a sector", entries(100, data, 100, hole, 312, data), 0, 0, 512, []extents.Extent{{Len: 512}}},
		{"the question was widened", entries(8192, hole), 4096, 4608, 8192, []extents.Extent{{Len: 3584, Hole: true}}},
		{"the answer is longer than the question", entries(1<<31, hole), 0, 0, 4096, []extents.Extent{{Len: 4096, Hole: true}}},
		{"the answer ends before the question", entries(512, hole), 0, 512, 4096, nil},
	} {
		if got := allocation(c.entries, c.start, c.off, c.end); !slices.Equal(got, c.want) {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}
