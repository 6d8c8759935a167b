package plugin

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/pluginpb"
)

func infoToPB(i Info) *pluginpb.Info {
	return &pluginpb.Info{
		Name:    i.Name,
		Version: i.Version,
		Kind:    pluginpb.Kind(i.Kind),
		Crash:   pluginpb.CrashClass(i.Crash),
		Names:   pluginpb.NameKind(i.Names),
		Matches: uint32(i.Matches),

		ListsNames: i.ListsNames,
	}
}

func infoFromPB(p *pluginpb.Info) Info {
	return Info{
		Name:    p.GetName(),
		Version: p.GetVersion(),
		Kind:    Kind(p.GetKind()),
		Crash:   crashFromPB(p.GetCrash()),
		Names:   NameKind(p.GetNames()),
		Matches: NodeKind(p.GetMatches()),

		ListsNames: p.GetListsNames(),
	}
}

// crashFromPB takes a class that is newer than us as the weakest.
func crashFromPB(c pluginpb.CrashClass) CrashClass {
	switch CrashClass(c) {
	case KeepsFlushed, KeepsAcknowledged:
		return CrashClass(c)
	}
	return LosesAll
}

func limitsToPB(l blk.Limits) *pluginpb.Limits {
	return &pluginpb.Limits{
		Size:               l.Size,
		LogicalBlockSize:   l.LogicalBlockSize,
		PhysicalBlockSize:  l.PhysicalBlockSize,
		MaxIoSize:          l.MaxIOSize,
		MaxDiscard:         l.MaxDiscard,
		DiscardGranularity: l.DiscardGranularity,
		DiscardAlignment:   l.DiscardAlignment,
		MaxWriteZeroes:     l.MaxWriteZeroes,
		MaxSegments:        uint32(l.MaxSegments),
		SecureErase:        l.SecureErase,
		WriteCache:         l.WriteCache,
		Fua:                l.FUA,
		Rotational:         l.Rotational,
		ReadOnly:           l.ReadOnly,
	}
}

func limitsFromPB(p *pluginpb.Limits) blk.Limits {
	return blk.Limits{
		Size:               p.GetSize(),
		LogicalBlockSize:   p.GetLogicalBlockSize(),
		PhysicalBlockSize:  p.GetPhysicalBlockSize(),
		MaxIOSize:          p.GetMaxIoSize(),
		MaxDiscard:         p.GetMaxDiscard(),
		DiscardGranularity: p.GetDiscardGranularity(),
		DiscardAlignment:   p.GetDiscardAlignment(),
		MaxWriteZeroes:     p.GetMaxWriteZeroes(),
		MaxSegments:        uint16(min(p.GetMaxSegments(), 0xffff)),
		SecureErase:        p.GetSecureErase(),
		WriteCache:         p.GetWriteCache(),
		FUA:                p.GetFua(),
		Rotational:         p.GetRotational(),
		ReadOnly:           p.GetReadOnly(),
	}
}

// checkLimits returns an error if no disk can have l. Both ends look: a host does not
// rely on the plugin.
func checkLimits(l *blk.Limits) error {
	b := l.LogicalBlockSize
	switch {
	case b < 512 || b > 4096 || bits.OnesCount32(b) != 1:
		return fmt.Errorf("limits: logical block size %d: a disk has 512, 1024, 2048 or 4096", b)
	case l.PhysicalBlockSize != 0 && bits.OnesCount32(l.PhysicalBlockSize) != 1:
		return fmt.Errorf("limits: physical block size %d is no power of two", l.PhysicalBlockSize)
	case l.Size > math.MaxInt64:
		return fmt.Errorf("limits: size %d: a disk has less than 2^63 bytes", l.Size)
	case l.Size%uint64(b) != 0:
		return fmt.Errorf("limits: size %d is no multiple of the block size %d", l.Size, b)
	}
	return nil
}
