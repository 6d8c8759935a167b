package client

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// known is what the users of a device rely on since it was opened first: kernels
// and NBD clients are told it once. A server that returns must have the same.
type known struct {
	Volume     uint64 `json:"volume,omitempty"` // 0: the server does not tell
	Block      uint32 `json:"block"`            // logical, bytes
	MaxIO      uint32 `json:"max_io"`           // bytes
	WriteCache bool   `json:"write_cache"`
	FUA        bool   `json:"fua"`
}

func knownOf(volume uint64, l *blk.Limits) *known {
	return &known{Volume: volume, Block: l.LogicalBlockSize, MaxIO: l.MaxIOSize, WriteCache: l.WriteCache, FUA: l.FUA}
}

// Errors of a device that is not what it was: it stays closed.
var (
	errOtherVolume = fmt.Errorf("the server has another volume under this name; if it is the right one, remap it with accept-new: %w", syscall.ESTALE)
	errChanged     = fmt.Errorf("users cannot be told; unmap and map it: %w", syscall.ESTALE)
)

// admit reports whether what the server tells now may take the place of k. accept:
// the user takes another volume. A write cache without which nothing is lost is kept
// in now: users go on to flush, and rely on it should the cache come back.
func (k *known) admit(now *known, accept bool) error {
	if k.Volume != 0 && now.Volume != 0 && k.Volume != now.Volume && !accept {
		return errOtherVolume
	}
	if now.Volume == 0 {
		now.Volume = k.Volume
	}
	switch {
	case k.Block != now.Block:
		return fmt.Errorf("blocks have %d bytes instead of %d: %w", now.Block, k.Block, errChanged)
	case now.MaxIO < k.MaxIO:
		return fmt.Errorf("the server takes requests of %d bytes, not %d any more: %w", now.MaxIO, k.MaxIO, errChanged)
	case now.WriteCache && !k.WriteCache:
		return fmt.Errorf("it has a write cache now, and users do not flush: %w", errChanged)
	case now.WriteCache && k.FUA && !now.FUA:
		return fmt.Errorf("it does not write through its cache (FUA) any more: %w", errChanged)
	}
	now.MaxIO, now.WriteCache, now.FUA = k.MaxIO, k.WriteCache, k.FUA
	return nil
}
