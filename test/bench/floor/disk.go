package main

import (
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// disk is a storage plugin with a file: the ring to the server as a source of its pump.
// A write goes past the page cache.
type disk struct {
	comp          *shm.Completer
	arena         []byte
	engine        uring.Engine
	reads, writes int32 // descriptors
	request       uring.Request
	sqes          [256]shm.SQE
}

func runDisk(c config, o opened) error {
	engine, err := uring.NewEngine(uring.EngineConfig{Depth: entries})
	if err != nil {
		return err
	}
	direct, err := unix.Open(c.file, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	cached, err := unix.Open(c.file, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	p, err := c.newPump("plugin")
	if err != nil {
		return err
	}
	d := &disk{comp: o.ring.Completer(), arena: o.arena, engine: engine, reads: int32(cached), writes: int32(direct)}
	if c.direct {
		d.reads = int32(direct)
	}
	return serve(p, &ended{disk: d}, d)
}

// Poll starts requests.
func (d *disk) Poll() int {
	n := d.comp.Pop(d.sqes[:])
	for i := range d.sqes[:n] {
		e := &d.sqes[i]
		d.request = uring.Request{Op: uring.Pread, FD: d.reads, Buf: payload(d.arena, e), Off: e.Offset, Tag: e.Tag}
		if e.Op == blk.Write {
			d.request.Op, d.request.FD = uring.Pwrite, d.writes
		}
		if !d.engine.Submit(&d.request) {
			fail("the I/O engine is full", nil)
		}
	}
	if n > 0 {
		d.engine.Flush()
	}
	return n
}

func (d *disk) Arm() bool { return d.comp.Arm() }
func (d *disk) Disarm()   { d.comp.Disarm() }
func (d *disk) FD() int   { return d.comp.FD() }

// ended are the completions of the I/O engine, another source of the pump.
type ended struct {
	*disk
	done [256]uring.Completion
}

// Poll answers. What a request has started in a turn is answered in the next one.
func (e *ended) Poll() int {
	n := e.engine.Reap(e.done[:])
	for _, c := range e.done[:n] {
		if c.Res <= 0 {
			fail("the file is not read or written", unix.Errno(-c.Res))
		}
		e.comp.Push(&shm.CQE{Tag: c.Tag})
	}
	e.comp.Publish()
	return n
}

func (e *ended) Arm() bool { return e.engine.Arm() }
func (e *ended) Disarm()   {}
func (e *ended) FD() int   { return e.engine.FD() }
