package plugintest

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
)

// blocking is a backend for storage with calls that block: a fixed number of
// goroutines per queue runs the requests. docs/writing-a-plugin.md shows it.
type blocking struct{ disk blockingDisk }

const workers = 8

// blockingQueue is one queue of it.
type blockingQueue struct {
	*plugin.Queue
	todo  chan plugin.Request // never full: it has room for all requests in flight
	batch [64]plugin.Request
}

func (b *blocking) Serve(q *plugin.Queue) error {
	p, err := pump.New(pump.Config{Name: fmt.Sprintf("q%d", q.Pump()), CPU: -1})
	if err != nil {
		return err
	}
	s := &blockingQueue{Queue: q, todo: make(chan plugin.Request, q.Depth())}
	if err := p.Add(s); err != nil {
		p.Stop()
		return err
	}
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for r := range s.todo {
				errno := r.Disk.(*blockingDisk).do(&r)
				p.Do(func() { q.Complete(r.Tag, errno) }) // on the thread of Serve
			}
		})
	}
	err = p.Run(q.Closed)
	close(s.todo)
	wg.Wait()
	return err
}

// Poll gives new requests to the workers and publishes the answers of old ones.
func (s *blockingQueue) Poll() int {
	n := s.Next(s.batch[:])
	for _, r := range s.batch[:n] {
		s.todo <- r
	}
	s.Publish()
	return n
}

func (b *blocking) Describe() plugin.Info {
	return plugin.Info{Name: "blocking", Version: "1", Names: plugin.NamesOpaque}
}

func (b *blocking) Open(context.Context, plugin.OpenRequest) (plugin.Disk, error) {
	return &b.disk, nil
}

// blockingDisk is a disk in memory behind a lock.
type blockingDisk struct {
	mu   sync.Mutex
	data [4 << 20]byte
}

func (d *blockingDisk) Limits() blk.Limits {
	return blk.Limits{Size: uint64(len(d.data)), LogicalBlockSize: 512}
}

func (d *blockingDisk) Close() error { return nil }

func (d *blockingDisk) do(r *plugin.Request) blk.Errno {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch r.Op {
	case blk.Read:
		copy(r.Buf, d.data[r.Off:])
	case blk.Write:
		copy(d.data[r.Off:], r.Buf)
	}
	return blk.OK
}

func TestRunIO_BackendWithGoroutines(t *testing.T) {
	RunIO(t, &blocking{}, Options{})
}
