package plugincheck

import (
	"context"
	"math"
	"math/bits"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

var describeChecks = []Check{
	{"describe-values", "Describe gives a name, a version, and values that this protocol knows", gate, describeValues},
	{"limits-sizes", "sizes in Limits make sense: blocks of 512 to 4096 bytes, a whole number of them, below 2^63", gate, limitsSizes},
	{"limits-operations", "operations that Limits offers work, each on one block", gate, limitsOperations},
	{"limits-refusals", "operations that Limits does not offer answer EOPNOTSUPP", gate, limitsRefusals},
	{"limits-read-only", "a disk that is opened read-only says so in Limits", gate, limitsReadOnly},
	{"configure-unknown", "an unknown setting is refused", gate, configureUnknown},
}

func describeValues(t *T) {
	s := t.plain()
	h := t.start(s, life{})
	info := h.p.Info()
	resp, err := pluginpb.NewPluginClient(h.p.Probe().Conn()).Describe(t.ctx, &pluginpb.DescribeRequest{RingVersion: plugin.RingVersion})
	t.must("describe", err)
	raw := resp.GetInfo()
	switch {
	case info.Name == "" || info.Version == "":
		t.Fatalf("the name is %q, the version %q", info.Name, info.Version)
	case raw.GetCrash() < 0 || raw.GetCrash() > pluginpb.CrashClass_CRASH_CLASS_KEEPS_ACKNOWLEDGED:
		t.Fatalf("crash class %d is unknown; a host takes it for loses-all", raw.GetCrash())
	case raw.GetNames() < 0 || raw.GetNames() > pluginpb.NameKind_NAME_KIND_OPAQUE:
		t.Fatalf("names of kind %d are unknown", raw.GetNames())
	case info.Names == plugin.NamesPath && info.Matches == 0:
		t.Fatalf("names are paths, and the plugin serves neither block devices nor regular files")
	case info.Matches&^(plugin.BlockDevices|plugin.RegularFiles) != 0:
		t.Fatalf("kinds of file %#x are unknown", uint32(info.Matches))
	}
}

func limitsSizes(t *T) {
	l := t.one().limits
	b := l.LogicalBlockSize
	if b < 512 || b > 4096 || bits.OnesCount32(b) != 1 {
		t.Fatalf("the logical block size is %d, want a power of two from 512 to 4096", b)
	}
	switch {
	case l.Size == 0 || l.Size > math.MaxInt64:
		t.Fatalf("the size is %d bytes", l.Size)
	case l.Size%uint64(b) != 0:
		t.Fatalf("the size %d is no multiple of the block size %d", l.Size, b)
	case l.PhysicalBlockSize != 0 && (l.PhysicalBlockSize < b || bits.OnesCount32(l.PhysicalBlockSize) != 1):
		t.Fatalf("the physical block size is %d, the logical one %d", l.PhysicalBlockSize, b)
	case l.MaxIOSize != 0 && (l.MaxIOSize < 4096 || l.MaxIOSize%b != 0):
		t.Fatalf("the largest request has %d bytes, want at least 4096 and whole blocks", l.MaxIOSize)
	case l.MaxDiscard != 0 && l.DiscardGranularity%b != 0:
		t.Fatalf("the discard granularity %d is no multiple of the block size %d", l.DiscardGranularity, b)
	case l.MaxDiscard != 0 && l.MaxDiscard < uint64(b), l.MaxWriteZeroes != 0 && l.MaxWriteZeroes < uint64(b):
		t.Fatalf("the longest discard (%d) or write-zeroes (%d) is shorter than a block", l.MaxDiscard, l.MaxWriteZeroes)
	}
}

// offers lists the operations that Limits may offer.
func (d *disk) offers(op blk.Op) bool {
	switch op {
	case blk.Read, blk.Flush:
		return true
	case blk.Write:
		return !d.limits.ReadOnly
	case blk.Discard:
		return d.limits.MaxDiscard != 0
	case blk.WriteZeroes:
		return d.limits.MaxWriteZeroes != 0
	case blk.SecureErase:
		return d.limits.SecureErase
	}
	return false
}

func limitsOperations(t *T) {
	d := t.one()
	for op := blk.Read; op.Valid(); op++ {
		if !d.offers(op) {
			continue
		}
		n := uint32(d.block())
		if op == blk.Discard || op == blk.SecureErase {
			n = max(n, d.limits.DiscardGranularity)
		}
		if errno := d.do(shm.SQE{Op: op, Len: n}); errno != blk.OK {
			t.Errorf("%v, which Limits offers: %v", op, errno)
		}
	}
}

func limitsRefusals(t *T) {
	d := t.one()
	for op := blk.Read; op.Valid(); op++ {
		if d.offers(op) || d.limits.ReadOnly {
			continue
		}
		if errno := d.do(shm.SQE{Op: op, Len: uint32(d.block())}); errno != blk.EOPNOTSUPP {
			t.Errorf("%v, which Limits does not offer: %v, want %v", op, errno, blk.EOPNOTSUPP)
		}
	}
}

func limitsReadOnly(t *T) {
	s := t.plain()
	if d := t.start(s, life{}).open(s, true); !d.limits.ReadOnly {
		t.Fatalf("Limits of a disk that was opened read-only do not say read_only")
	}
}

func configureUnknown(t *T) {
	if t.o.Backend != nil {
		t.Skipf("a backend is configured once; the program is judged as a process")
	}
	s := t.plain()
	ctx, cancel := context.WithTimeout(t.ctx, callTime)
	defer cancel()
	settings := t.o.config(s.dir)
	settings["plugin-test-unknown-setting"] = "1"
	p, err := plugin.Launch(ctx, plugin.Config{Path: t.o.Executable, Kind: plugin.KindIO, Configure: settings, Logger: t.o.Logger})
	if err == nil {
		_ = p.Stop(ctx)
		t.Fatalf("Configure takes the setting plugin-test-unknown-setting")
	}
}
