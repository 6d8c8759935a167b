// Command io-memory is a storage plugin for rnbd that keeps its disks in
// memory: any name is a disk of the configured size, zero at first, gone with
// the process.
package main

import (
	"context"
	"fmt"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

type backend struct {
	size  uint64
	mu    sync.Mutex
	disks map[string]disk
}

type disk []byte

func (b *backend) Describe() plugin.Info {
	return plugin.Info{Name: "memory", Version: "1.0", Crash: plugin.LosesAll, Names: plugin.NamesOpaque}
}

func (b *backend) Configure(settings map[string]string) (err error) {
	for k, v := range settings {
		if k != "size" {
			return fmt.Errorf("unknown setting %q, known is size (bytes): %w", k, blk.EINVAL)
		}
		if b.size, err = strconv.ParseUint(v, 0, 40); err != nil || b.size%4096 != 0 {
			return fmt.Errorf("size %q: want a multiple of 4096: %w", v, blk.EINVAL)
		}
	}
	return nil
}

func (b *backend) Open(_ context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.disks[r.Name] == nil {
		d, err := unix.Mmap(-1, 0, int(b.size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return nil, fmt.Errorf("memory for a disk of %d bytes: %w", b.size, err)
		}
		_ = unix.Madvise(d, unix.MADV_HUGEPAGE) // costs speed only where there are none
		b.disks[r.Name] = d
	}
	return b.disks[r.Name], nil
}

func (d disk) Limits() blk.Limits {
	n := uint64(len(d))
	return blk.Limits{Size: n, LogicalBlockSize: 512, MaxDiscard: n, MaxWriteZeroes: n, SecureErase: true, FUA: true}
}

func (d disk) Close() error { return nil }

func (b *backend) Serve(q *plugin.Queue) error {
	batch := make([]plugin.Request, 64)
	for !q.Closed() {
		n := q.Next(batch)
		for _, r := range batch[:n] {
			d := r.Disk.(disk)
			switch r.Op {
			case blk.Read:
				copy(r.Buf, d[r.Off:])
			case blk.Write:
				copy(d[r.Off:], r.Buf)
			case blk.Discard, blk.SecureErase, blk.WriteZeroes:
				clear(d[r.Off:][:r.Len])
			}
			q.Complete(r.Tag, blk.OK)
		}
		q.Publish()
		if n == 0 {
			q.Wait()
		}
	}
	return nil
}

func main() {
	plugin.ServeIO(&backend{size: 64 << 20, disks: map[string]disk{}})
}
