package control

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Limits returns the message for the limits of a device.
func Limits(l *blk.Limits) *controlpb.Limits {
	return &controlpb.Limits{
		Size: l.Size, LogicalBlockSize: l.LogicalBlockSize, PhysicalBlockSize: l.PhysicalBlockSize,
		MaxIoSize: l.MaxIOSize, MaxDiscard: l.MaxDiscard, DiscardGranularity: l.DiscardGranularity,
		MaxWriteZeroes: l.MaxWriteZeroes, WriteCache: l.WriteCache, Fua: l.FUA,
		Rotational: l.Rotational, ReadOnly: l.ReadOnly, SecureErase: l.SecureErase,
	}
}
