package client

import (
	"context"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// Export is a name that a server offers.
type Export struct {
	Name    string // in the form of MapRequest.Path
	Size    uint64 // bytes
	Block   bool   // a block device of the server, else a file
	Readers int    // sessions that have it open read-only
	Writers int    // sessions that have it open for writing
	User    string // a session that has it open, a writer if there is one
}

// Offer is the result of Discover.
type Offer struct {
	Exports []Export // sorted by name
	Cut     bool     // the server has more names than it lists
	// Paths reports that the server has no search path. Then any block device
	// of its host can be mapped by its path, and none is listed.
	Paths bool
}

// maxExports bounds the number of names taken from a server.
const maxExports = 1 << 20

// Discover returns the names that the server behind paths offers to a session
// with that name. It opens a session for the question. Paths are written as in
// MapRequest. If name is empty, the session gets one that no other session has.
// ctx bounds the time. The error is EOPNOTSUPP if the server cannot list names,
// as that of a Linux kernel. Other errors are those of Map.
func (c *Client) Discover(ctx context.Context, paths []string, name string) (o Offer, err error) {
	err = c.withSession(ctx, name, paths, func(s *session) error {
		if s.features.Load()&rnbdwire.FeatureList == 0 {
			return fmt.Errorf("server %s does not list what it exports: it is a Linux kernel, older, or runs with --list=false: %w", s.serverAddress(), syscall.EOPNOTSUPP)
		}
		size := min(s.maxIO(), rnbdwire.ListRspMax)
		for after, more := "", true; more; {
			if more, err = s.listPage(ctx, &o, after, size); err != nil {
				return fmt.Errorf("list of server %s: %w", s.serverAddress(), err)
			}
			if more {
				after = o.Exports[len(o.Exports)-1].Name
			}
		}
		return nil
	})
	return o, err
}

// listPage asks for the names after the name after. more reports that there are
// further ones.
func (s *session) listPage(ctx context.Context, o *Offer, after string, size int) (more bool, err error) {
	msg := make([]byte, rnbdwire.ListSize)
	if err := (rnbdwire.ListFields{After: after}).Put(msg); err != nil {
		return false, fmt.Errorf("%w: %w", err, syscall.EPROTO)
	}
	rsp := make(rnbdwire.ListRsp, size)
	if err := s.transport.AdminRead(ctx, msg, rsp); err != nil {
		return false, err
	}
	entries, err := rsp.Entries()
	if err != nil {
		return false, fmt.Errorf("%w: %w", err, syscall.EPROTO)
	}
	for _, e := range entries {
		if e.Name <= after || len(o.Exports) >= maxExports {
			return false, fmt.Errorf("name %q behind %q is out of order, or one too many: %w", e.Name, after, syscall.EPROTO)
		}
		after = e.Name
		if e.Sectors > maxSectors {
			return false, fmt.Errorf("%q has an impossible size of %d sectors: %w", e.Name, e.Sectors, syscall.EPROTO)
		}
		o.Exports = append(o.Exports, Export{
			Name: e.Name, Size: e.Sectors * blk.SectorSize, Block: e.Block,
			Readers: int(e.Readers), Writers: int(e.Writers), User: e.User,
		})
	}
	flags := rsp.Flags()
	o.Cut, o.Paths = o.Cut || flags&rnbdwire.ListCut != 0, flags&rnbdwire.ListUnsearched != 0
	if more = flags&rnbdwire.ListMore != 0; more && len(entries) == 0 {
		return false, fmt.Errorf("a page that is not the last has no name: %w", syscall.EPROTO)
	}
	return more, nil
}
