//go:build librbd

package main

import (
	"fmt"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
)

// source hands the requests of a queue to their disks. librbd is called by the workers of
// each disk, since its calls block.
type source struct {
	*plugin.Queue
	pump  *pump.Pump
	batch [64]plugin.Request
	done  func(tag uint64, e blk.Errno)
}

// Poll hands over new requests and publishes the answers of old ones.
func (s *source) Poll() int {
	n := s.Next(s.batch[:])
	for _, r := range s.batch[:n] {
		r.Disk.(*disk).submit(job{req: r, done: s.done})
	}
	s.Publish()
	return n
}

// Serve answers a queue. It returns when no request is in flight.
func (b *backend) Serve(q *plugin.Queue) error {
	p, err := pump.New(pump.Config{Name: fmt.Sprintf("q%d", q.Pump()), CPU: -1})
	if err != nil {
		return err
	}
	s := &source{Queue: q, pump: p}
	s.done = func(tag uint64, e blk.Errno) { p.Do(func() { q.Complete(tag, e) }) } // on the thread of Serve
	if err := p.Add(s); err != nil {
		p.Stop()
		return err
	}
	return p.Run(func() bool { return q.Closed() && q.InFlight() == 0 })
}
