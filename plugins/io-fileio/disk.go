package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/diskio"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const version = "0.1.0"

// Descriptions of a file, each with a fence of its own.
const (
	cachedDescription = 0
	directDescription = 1
)

// backend is the plugin; Configure and Serve are diskio's.
type backend struct{ diskio.Server }

// Describe says that a crash loses no acknowledged write: the page cache or
// the device has it.
func (*backend) Describe() plugin.Info {
	return plugin.Info{
		Name: "fileio", Version: version,
		Crash: plugin.KeepsAcknowledged, Names: plugin.NamesPath, Matches: plugin.RegularFiles,
	}
}

// Open opens a regular file behind its fences, or a block device as if it were
// one, for a client that wishes for the page cache. Anything else is ENOTBLK.
func (*backend) Open(ctx context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	if err := diskio.CheckKind(r, unix.S_IFREG, unix.S_IFBLK); err != nil {
		return nil, err
	}
	d := &disk{name: r.Name, readOnly: !diskio.Writable(r)}
	if err := d.open(ctx, r); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// disk is an open file.
type disk struct {
	name     string
	readOnly bool
	cached   *os.File // through the page cache
	direct   *os.File // past it; nil: read-only, a device, or the file system cannot
	cachedFD int32    // of cached
	directFD int32    // of direct
	align    alignment
	device   bool // a block device
	memory   bool // the file system lives in memory
	noDsync  bool // the file system does not heed RWF_DSYNC of direct writes
	canPunch bool // found out at Open, without a touch of the file

	noNowait, noZeroRange, noPunch atomic.Bool // learned from refusals

	mu     sync.Mutex
	limits blk.Limits
}

// open takes the fences of both descriptions before anything is read or
// written. What earlier processes left dirty in the page cache must not be
// written back over what is written past the cache from now on: hence the
// fsync.
func (d *disk) open(ctx context.Context, r plugin.OpenRequest) error {
	var err error
	if d.cached, err = diskio.Open(ctx, r, diskio.AccessFlags(r), cachedDescription); err != nil {
		return err
	}
	d.cachedFD = int32(d.cached.Fd())
	if err := d.lookAtFile(); err != nil {
		return err
	}
	if !d.readOnly {
		if err := d.openDirect(ctx, r); err != nil {
			return err
		}
		if err := d.cached.Sync(); err != nil {
			return fmt.Errorf("open %q: write back what earlier users left: %w", d.name, err)
		}
	}
	if d.limits, err = d.readLimits(); err != nil {
		return err
	}
	return nil
}

// openDirect is content with less where the file system has no direct I/O. A
// block device has none beside its page cache: unlike a file system, it does
// not drop what a read puts there while a direct write of the same page is on
// its way, so that later reads would see what was there before.
func (d *disk) openDirect(ctx context.Context, r plugin.OpenRequest) error {
	if d.device || d.memory || !d.align.direct {
		return nil
	}
	f, err := diskio.Open(ctx, r, os.O_RDWR|unix.O_DIRECT, directDescription)
	switch {
	case err == nil:
		d.direct, d.directFD = f, int32(f.Fd())
	case errors.Is(err, unix.EINVAL):
		slog.Info("no direct I/O here, writes go through the page cache", "file", d.name)
	default:
		return err
	}
	return nil
}

// Limits are what was found at Open or the last Resize.
func (d *disk) Limits() blk.Limits {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.limits
}

// Resize looks at the file's size again.
func (d *disk) Resize(context.Context) (blk.Limits, error) {
	limits, err := d.readLimits()
	if err != nil {
		return blk.Limits{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.limits = limits
	return limits, nil
}

// Close closes both descriptions; each fence falls when its last I/O has
// ended.
func (d *disk) Close() error {
	var errs []error
	for _, f := range []*os.File{d.direct, d.cached} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close %q: %w", d.name, err)
	}
	return nil
}
