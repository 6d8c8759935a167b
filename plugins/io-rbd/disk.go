//go:build librbd

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/ceph/go-ceph/rados"
	"github.com/ceph/go-ceph/rbd"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

const (
	workers   = 16      // calls into librbd at a time, of one disk
	maxRange  = 1 << 30 // longest discard or range of zeroes, in bytes
	zeroPiece = 1 << 20 // zeroes that are written at once, in bytes
	diffRange = 1 << 30 // bytes that are looked at for one list of extents
)

// disk is an open image.
type disk struct {
	conn     *rados.Conn
	io       *rados.IOContext
	img      *rbd.Image
	readOnly bool
	size     uint64

	mu      sync.Mutex
	work    *sync.Cond
	todo    []job // waiting for a worker
	closed  bool
	running sync.WaitGroup
}

// job is a request for a worker.
type job struct {
	req  plugin.Request
	done func(tag uint64, e blk.Errno)
}

// start starts the workers.
func (d *disk) start() {
	d.work = sync.NewCond(&d.mu)
	for range workers {
		d.running.Go(d.run)
	}
}

func (d *disk) run() {
	for {
		d.mu.Lock()
		for len(d.todo) == 0 && !d.closed {
			d.work.Wait()
		}
		if len(d.todo) == 0 {
			d.mu.Unlock()
			return
		}
		j := d.todo[0]
		d.todo = d.todo[1:]
		d.mu.Unlock()
		j.done(j.req.Tag, d.carryOut(&j.req))
	}
}

// submit gives a request to the workers. It does not wait for them.
func (d *disk) submit(j job) {
	d.mu.Lock()
	d.todo = append(d.todo, j)
	d.mu.Unlock()
	d.work.Signal()
}

// Limits are those of the image. Requests without a cache need no flush.
func (d *disk) Limits() blk.Limits {
	l := blk.Limits{Size: d.size &^ (blk.SectorSize - 1), LogicalBlockSize: blk.SectorSize, PhysicalBlockSize: 4096, ReadOnly: d.readOnly, FUA: true}
	if !d.readOnly {
		l.MaxDiscard, l.DiscardGranularity, l.MaxWriteZeroes = maxRange, 64<<10, maxRange
	}
	return l
}

// Resize looks at the size again, which librbd learns by a watch.
func (d *disk) Resize(context.Context) (blk.Limits, error) {
	size, err := d.img.GetSize()
	if err != nil {
		return blk.Limits{}, errnoOf(err)
	}
	d.size = size
	return d.Limits(), nil
}

// Close ends the workers and closes the image, which frees its lock.
func (d *disk) Close() error {
	d.mu.Lock()
	d.closed = true
	d.mu.Unlock()
	d.work.Broadcast()
	d.running.Wait()
	return d.release()
}

// release closes what open has opened.
func (d *disk) release() (err error) {
	if d.img != nil {
		err = d.img.Close()
	}
	if d.io != nil {
		d.io.Destroy()
	}
	if d.conn != nil {
		d.conn.Shutdown()
	}
	return err
}

var zeroes [zeroPiece]byte

// carryOut makes the call of a request.
func (d *disk) carryOut(r *plugin.Request) blk.Errno {
	var err error
	switch r.Op {
	case blk.Read:
		var n int
		if n, err = d.img.ReadAt(r.Buf, int64(r.Off)); n == len(r.Buf) && errors.Is(err, io.EOF) {
			err = nil
		}
	case blk.Write:
		_, err = d.img.WriteAt(r.Buf, int64(r.Off))
	case blk.Flush:
		if !d.readOnly {
			err = d.img.Flush()
		}
	case blk.Discard:
		_, err = d.img.Discard(r.Off, uint64(r.Len))
	case blk.WriteZeroes:
		err = d.writeZeroes(r.Off, uint64(r.Len), r.Flags&blk.NoUnmap != 0)
	default:
		return blk.EOPNOTSUPP
	}
	switch e := code(err); {
	case err == nil:
		return blk.OK
	case e != blk.OK:
		return e
	}
	return blk.EIO
}

// writeZeroes writes zeroes. Unless keep is set, librbd frees the storage of ranges that
// are zeroes.
func (d *disk) writeZeroes(off, n uint64, keep bool) error {
	if !keep {
		_, err := d.img.WriteSame(off, n, zeroes[:blk.SectorSize], rados.OpFlagNone)
		return err
	}
	for n > 0 {
		k := min(n, zeroPiece)
		if _, err := d.img.WriteAt(zeroes[:k], int64(off)); err != nil {
			return err
		}
		off, n = off+k, n-k
	}
	return nil
}

// Extents lists what of the image, with its parents, has data.
func (d *disk) Extents(_ context.Context, off, n uint64) ([]extents.Extent, error) {
	end := off + min(n, diffRange)
	var list []extents.Extent
	at, full := off, false
	add := func(until uint64, hole bool) {
		if until = min(until, end); until > at && !full {
			var ok bool
			if list, ok = extents.Add(list, until-at, hole); !ok {
				full = true
				return
			}
			at = until
		}
	}
	const sector = blk.SectorSize - 1
	err := d.img.DiffIterate(rbd.DiffIterateConfig{
		SnapName: rbd.NoSnapshot, Offset: off, Length: end - off, IncludeParent: rbd.IncludeParent, WholeObject: rbd.DisableWholeObject,
		Callback: func(begin, length uint64, exists int, _ any) int {
			if exists != 0 {
				add(begin&^sector, true)
				add((begin+length+sector)&^sector, false)
			}
			return 0
		},
	})
	if err != nil {
		return nil, fmt.Errorf("list what holds data: %w", errnoOf(err))
	}
	add(end, true)
	return list, nil
}
