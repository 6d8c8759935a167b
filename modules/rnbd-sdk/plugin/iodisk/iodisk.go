// Package iodisk serves storage with the interfaces of package io as disks.
//
// A storage plugin whose disks are an io.ReaderAt and io.WriterAt needs one function:
//
//	func main() {
//		plugin.ServeIO(&iodisk.Server{
//			Info: plugin.Info{Name: "archive", Version: "1.0", Names: plugin.NamesOpaque},
//			OpenStore: func(ctx context.Context, r plugin.OpenRequest) (iodisk.Store, error) {
//				return archive.Open(ctx, r.Name)
//			},
//		})
//	}
//
// # Threads
//
// Each queue has Server.Workers goroutines that make the calls, so a call may block. A
// store that hangs occupies workers, and then delays the other disks of the process.
//
// # Hazards
//
// The crash class in Info is a promise of the author. A plugin with another class than
// plugin.LosesAll takes its fence in OpenStore (package fence).
package iodisk

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
)

// Store is the storage of one disk. Calls come from several goroutines at once. Buffers
// belong to the caller, and are not used after the call has returned. The errno in the
// chain of an error reaches the user; without one the user gets EIO.
//
// A Store that is also an io.WriterAt can be written.
type Store interface {
	io.ReaderAt
	// Size returns the size in bytes. It is rounded down to whole blocks.
	Size() int64
	// Close is called when no other call runs, and none will come.
	Close() error
}

// A Store may also have any of these.
type (
	// Syncer makes written bytes durable. Without it every write that has returned is
	// durable.
	Syncer interface{ Sync() error }
	// Discarder frees the storage of n bytes at off, whose content is undefined then.
	Discarder interface{ Discard(off, n int64) error }
	// Zeroer writes n zeroes at off. keep forbids to free their storage.
	Zeroer interface {
		WriteZeroes(off, n int64, keep bool) error
	}
)

// Server is a plugin.Backend.
type Server struct {
	Info plugin.Info
	// OpenStore opens the storage of a disk. It may be called from several goroutines at
	// once. See plugin.Backend.
	OpenStore func(context.Context, plugin.OpenRequest) (Store, error)
	// BlockSize is the logical block size of the disks in bytes; 0: 512.
	BlockSize uint32
	// Workers is the number of goroutines of each queue; 0: 16.
	Workers int
}

// Describe returns Info.
func (s *Server) Describe() plugin.Info { return s.Info }

// Open opens a disk.
func (s *Server) Open(ctx context.Context, r plugin.OpenRequest) (plugin.Disk, error) {
	store, err := s.OpenStore(ctx, r)
	if err != nil {
		return nil, err
	}
	block := s.BlockSize
	if block == 0 {
		block = blk.SectorSize
	}
	if store.Size() < int64(block) {
		return nil, errors.Join(fmt.Errorf("open %q: %d bytes are less than a block: %w", r.Name, store.Size(), blk.EINVAL), store.Close())
	}
	d := &disk{store: store, block: block, readOnly: r.ReadOnly}
	d.writer, _ = store.(io.WriterAt)
	d.syncer, _ = store.(Syncer)
	d.discarder, _ = store.(Discarder)
	d.zeroer, _ = store.(Zeroer)
	return d, nil
}

// Serve answers the requests of q by goroutines.
func (s *Server) Serve(q *plugin.Queue) error {
	p, err := pump.New(pump.Config{Name: fmt.Sprintf("q%d", q.Pump()), CPU: -1})
	if err != nil {
		return err
	}
	source := &queue{Queue: q, requests: make(chan plugin.Request, q.Depth())}
	if err := p.Add(source); err != nil {
		p.Stop()
		return err
	}
	workers := s.Workers
	if workers <= 0 {
		workers = 16
	}
	var running sync.WaitGroup
	for range workers {
		running.Go(func() {
			for r := range source.requests {
				errno := r.Disk.(*disk).carryOut(&r)
				p.Do(func() { q.Complete(r.Tag, errno) }) // on the thread of Serve
			}
		})
	}
	err = p.Run(q.Closed)
	close(source.requests)
	running.Wait()
	return err
}

// queue hands the requests of a plugin.Queue to the workers.
type queue struct {
	*plugin.Queue
	requests chan plugin.Request // has room for all requests in flight
	batch    [64]plugin.Request
}

// Poll hands over new requests and publishes the answers of old ones.
func (q *queue) Poll() int {
	n := q.Next(q.batch[:])
	for _, r := range q.batch[:n] {
		q.requests <- r
	}
	q.Publish()
	return n
}

// disk is one open disk.
type disk struct {
	store     Store
	block     uint32
	readOnly  bool
	writer    io.WriterAt // nil: the store cannot be written
	syncer    Syncer
	discarder Discarder
	zeroer    Zeroer
}

// maxRange is the longest discard or range of zeroes, in bytes.
const maxRange = 1 << 30

// Limits returns what the store offers.
func (d *disk) Limits() blk.Limits {
	l := blk.Limits{
		Size: uint64(d.store.Size()) &^ (uint64(d.block) - 1), LogicalBlockSize: d.block,
		ReadOnly: d.writer == nil || d.readOnly, WriteCache: d.syncer != nil && d.writer != nil,
	}
	if d.discarder != nil && d.writer != nil {
		l.MaxDiscard, l.DiscardGranularity = maxRange, d.block
	}
	if d.zeroer != nil && d.writer != nil {
		l.MaxWriteZeroes = maxRange
	}
	return l
}

// Close closes the store.
func (d *disk) Close() error { return d.store.Close() }

// carryOut makes the call of a request.
func (d *disk) carryOut(r *plugin.Request) blk.Errno {
	var err error
	off, n := int64(r.Off), int64(r.Len)
	switch r.Op {
	case blk.Read:
		err = readFull(d.store, r.Buf, off)
	case blk.Write:
		_, err = d.writer.WriteAt(r.Buf, off)
	case blk.Flush:
		if d.syncer != nil {
			err = d.syncer.Sync()
		}
	case blk.Discard:
		err = d.discarder.Discard(off, n)
	case blk.WriteZeroes:
		err = d.zeroer.WriteZeroes(off, n, r.Flags&blk.NoUnmap != 0)
	default:
		return blk.EOPNOTSUPP
	}
	if err != nil {
		return blk.ToErrno(err)
	}
	return blk.OK
}

// readFull reads len(b) bytes. An io.ReaderAt may return io.EOF with the last of them.
func readFull(r io.ReaderAt, b []byte, off int64) error {
	n, err := r.ReadAt(b, off)
	if n == len(b) && errors.Is(err, io.EOF) {
		return nil
	}
	if err == nil && n < len(b) {
		return io.ErrUnexpectedEOF
	}
	return err
}
