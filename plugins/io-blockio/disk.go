package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/diskio"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const version = "0.1.0"

// blockBackend is the plugin; Configure and Serve are diskio's.
type blockBackend struct{ diskio.Server }

// Describe promises that a crash loses no acknowledged write: the write is on
// the device or in its cache.
func (*blockBackend) Describe() plugin.Info {
	return plugin.Info{
		Name: "blockio", Version: version,
		Crash: plugin.KeepsAcknowledged, Names: plugin.NamesPath, Matches: plugin.BlockDevices,
	}
}

// Open opens a block device for direct I/O behind its fence. Anything but a
// block device is ENOTBLK.
func (*blockBackend) Open(ctx context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	if err := diskio.CheckKind(r, unix.S_IFBLK); err != nil {
		return nil, err
	}
	f, err := diskio.Open(ctx, r, diskio.AccessFlags(r)|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	d := &blockDisk{file: f, fd: int32(f.Fd()), name: r.Name, readOnly: !diskio.Writable(r)}
	if _, err := d.Resize(ctx); err != nil {
		f.Close()
		return nil, err
	}
	return d, nil
}

// blockDisk is an open block device.
type blockDisk struct {
	file     *os.File
	fd       int32 // of file
	name     string
	readOnly bool // opened so

	block atomic.Uint32 // logical block size: alignment of direct I/O
	// noPunch and noDiscard are set when the device has refused to punch a hole or to
	// discard.
	noPunch, noDiscard atomic.Bool

	mu     sync.Mutex
	limits blk.Limits
}

// Limits returns the limits as of Open or the last Resize.
func (d *blockDisk) Limits() blk.Limits {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.limits
}

// Resize reads the limits again.
func (d *blockDisk) Resize(context.Context) (blk.Limits, error) {
	limits, err := d.readLimits()
	if err != nil {
		return blk.Limits{}, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.limits = limits
	d.block.Store(limits.LogicalBlockSize)
	return limits, nil
}

// Close closes the device. Its fence is released when the last I/O has ended.
func (d *blockDisk) Close() error {
	if err := d.file.Close(); err != nil {
		return fmt.Errorf("close %q: %w", d.name, err)
	}
	return nil
}
