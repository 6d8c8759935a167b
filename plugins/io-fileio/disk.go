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

// fileBackend is the plugin; Configure and Serve are diskio's.
type fileBackend struct{ diskio.Server }

// Describe promises that a crash loses no acknowledged write: the write is in
// the page cache or on the device.
func (*fileBackend) Describe() plugin.Info {
	return plugin.Info{
		Name: "fileio", Version: version,
		Crash: plugin.KeepsAcknowledged, Names: plugin.NamesPath, Matches: plugin.RegularFiles,
	}
}

// Open opens a regular file behind its fences, or a block device for a client
// that asks for the page cache. Any other node is ENOTBLK.
func (*fileBackend) Open(ctx context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	if err := diskio.CheckKind(r, unix.S_IFREG, unix.S_IFBLK); err != nil {
		return nil, err
	}
	d := &fileDisk{name: r.Name, readOnly: !diskio.Writable(r)}
	if err := d.openFile(ctx, r); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// fileDisk is an open file.
type fileDisk struct {
	name     string
	readOnly bool
	cached   *os.File // through the page cache
	direct   *os.File // past the page cache; nil if read-only, a device, or unsupported
	cachedFD int32    // of cached
	directFD int32    // of direct
	align    ioAlignment
	device   bool // a block device
	memory   bool // the file system lives in memory
	blocks   bool // the file system may block a caller that asks it not to
	noDsync  bool // the file system ignores RWF_DSYNC of direct writes
	canPunch bool // see punches

	noNowait, noZeroRange, noPunch atomic.Bool // set when the kernel has refused one

	length atomic.Uint64 // bytes of the file at Open or the last Resize

	mu     sync.Mutex
	limits blk.Limits
}

// openFile takes the fences of both descriptions before anything is read or written.
// Dirty pages that earlier processes have left must not be written back over
// later direct writes, so open ends with an fsync.
func (d *fileDisk) openFile(ctx context.Context, r plugin.OpenRequest) error {
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

// openDirect opens the file for direct writes if its file system has direct
// I/O. A block device is not written directly beside cached reads: unlike a file
// system, it does not invalidate a page that a read fills while a direct write
// of the page is in flight, so later reads could return the old data.
func (d *fileDisk) openDirect(ctx context.Context, r plugin.OpenRequest) error {
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

// Limits returns the limits as of Open or the last Resize.
func (d *fileDisk) Limits() blk.Limits {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.limits
}

// Resize reads the file's size again.
func (d *fileDisk) Resize(context.Context) (blk.Limits, error) {
	limits, err := d.readLimits()
	if err != nil {
		return blk.Limits{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.limits = limits
	return limits, nil
}

// Close closes both descriptions. Each fence is released when the last I/O of
// its description has ended.
func (d *fileDisk) Close() error {
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
