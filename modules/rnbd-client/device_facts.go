package client

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// deviceFacts are the facts about a device on which its users rely from the first
// open, since kernels and NBD clients learn them once. A server that returns
// must have the same.
type deviceFacts struct {
	Volume     uint64 `json:"volume,omitempty"` // 0: not known
	Block      uint32 `json:"block"`            // logical, bytes
	MaxIO      uint32 `json:"max_io"`           // bytes
	WriteCache bool   `json:"write_cache"`
	FUA        bool   `json:"fua"`
	// Verifier is the incarnation of the storage, see durable.go. 0: not told.
	Verifier rnbdwire.Verifier `json:"verifier,omitempty"`
}

func knownOf(f *rnbdwire.OpenRspFields, l *blk.Limits) *deviceFacts {
	return &deviceFacts{Volume: f.Volume, Verifier: f.Verifier, Block: l.LogicalBlockSize, MaxIO: l.MaxIOSize, WriteCache: l.WriteCache, FUA: l.FUA}
}

// Errors of a device that differs from the one before. It stays closed.
var (
	errOtherVolume = fmt.Errorf("the server has another volume under this name; if it is the right one, remap it with accept-new: %w", syscall.ESTALE)
	errChanged     = fmt.Errorf("users cannot be told; unmap and map it: %w", syscall.ESTALE)
)

// checkSuccessor reports whether now may replace k. now is the server's latest answer.
// accept allows another volume. If the write cache is gone, admit keeps it in
// now: users continue to flush, and need that if the cache returns.
func (k *deviceFacts) checkSuccessor(now *deviceFacts, accept bool) error {
	if k.Volume != 0 && now.Volume != 0 && k.Volume != now.Volume && !accept {
		return errOtherVolume
	}
	if now.Volume == 0 {
		now.Volume = k.Volume
	}
	switch {
	case k.Block%now.Block != 0: // smaller blocks are good: each request of users is whole blocks
		return fmt.Errorf("blocks have %d bytes instead of %d: %w", now.Block, k.Block, errChanged)
	case now.MaxIO < k.MaxIO:
		return fmt.Errorf("the server takes requests of %d bytes, not %d any more: %w", now.MaxIO, k.MaxIO, errChanged)
	case now.WriteCache && !k.WriteCache:
		return fmt.Errorf("it has a write cache now, and users do not flush: %w", errChanged)
	case now.WriteCache && k.FUA && !now.FUA:
		return fmt.Errorf("it does not write through its cache (FUA) any more: %w", errChanged)
	}
	now.Block = k.Block
	now.MaxIO, now.WriteCache, now.FUA = k.MaxIO, k.WriteCache, k.FUA
	return nil
}
