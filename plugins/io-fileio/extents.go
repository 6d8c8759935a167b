package main

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

var _ plugin.Mapper = (*fileDisk)(nil)

// Extents asks the file system where data and holes begin. It stops after the range
// that it is at when ctx ends.
func (d *fileDisk) Extents(ctx context.Context, off, n uint64) ([]extents.Extent, error) {
	if d.device {
		return nil, fmt.Errorf("%q is a block device, which has no holes to see: %w", d.name, blk.EOPNOTSUPP)
	}
	raw, err := d.cached.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("extents of %q: %w", d.name, err)
	}
	var list []extents.Extent
	var serr error
	if err := raw.Control(func(fd uintptr) { // the descriptor stays open meanwhile
		seek := func(at uint64, whence int) (uint64, error) {
			next, err := unix.Seek(int(fd), int64(at), whence)
			return uint64(next), err
		}
		if serr = d.writeBack(int(fd), off, n); serr == nil {
			list, serr = mapFile(ctx, seek, off, n, uint64(d.Limits().LogicalBlockSize))
		}
	}); err != nil {
		return nil, fmt.Errorf("extents of %q: %w", d.name, err)
	}
	if serr != nil {
		return nil, fmt.Errorf("extents of %q: %w", d.name, serr)
	}
	return list, nil
}

// writeBack makes the range known to a file system that asks a daemon or a server for
// its holes: pages of this host's cache that have not left it do not count there.
func (d *fileDisk) writeBack(fd int, off, n uint64) error {
	if !d.blocks {
		return nil
	}
	const flags = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	if err := unix.SyncFileRange(fd, int64(off), int64(n), flags); err != nil {
		return fmt.Errorf("write back %d bytes at %d: %w", n, off, err)
	}
	return nil
}

// mapFile lists data and holes of n bytes from byte off on, until the list is full. A
// block that holds any data holds data.
func mapFile(ctx context.Context, seek seekFunc, off, n, block uint64) (list []extents.Extent, err error) {
	for at, end := off, off+n; at < end; {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		data, err := seek.nextData(at, end)
		if err != nil {
			return nil, err
		}
		ok := true
		if data = max(data-data%block, at); data > at {
			if list, ok = extents.Add(list, data-at, true); !ok {
				break
			}
		}
		if at = data; at == end {
			break
		}
		hole, err := seek.nextHole(at, end)
		if err != nil {
			return nil, err
		}
		hole = min(hole+(block-hole%block)%block, end)
		if list, ok = extents.Add(list, hole-at, false); !ok {
			break
		}
		at = hole
	}
	return list, nil
}

// seekFunc is lseek.
type seekFunc func(at uint64, whence int) (uint64, error)

// nextData returns where the first data of [at, end) are; end: there is a hole up to
// there. Bytes behind the end of the file count as data, since they do not read
// as zeroes.
func (s seekFunc) nextData(at, end uint64) (uint64, error) {
	next, err := s(at, unix.SEEK_DATA)
	switch {
	case err == nil:
		return min(max(next, at), end), nil
	case errors.Is(err, unix.ENXIO):
		size, err := s(0, unix.SEEK_END)
		return min(max(size, at), end), err
	case isUnknown(err):
		return at, nil
	}
	return 0, fmt.Errorf("look for data at byte %d: %w", at, err)
}

// nextHole returns where the first hole behind at is: at most end. The byte at at is data.
func (s seekFunc) nextHole(at, end uint64) (uint64, error) {
	next, err := s(at, unix.SEEK_HOLE)
	switch {
	case err == nil && next > at:
		return min(next, end), nil
	case err == nil: // the data at this place have just been discarded
		return min(at+1, end), nil
	case errors.Is(err, unix.ENXIO), isUnknown(err):
		return end, nil
	}
	return 0, fmt.Errorf("look for a hole at byte %d: %w", at, err)
}

// isUnknown reports whether the file system knows nothing of holes.
func isUnknown(err error) bool {
	return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS)
}
