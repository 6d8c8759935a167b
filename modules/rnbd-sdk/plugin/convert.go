package plugin

import (
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
