package client

import (
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
)

// Questions of front ends about extents. They take a slot of their source, as
// requests do, and are no I/O.

// onExtents begins the answer to a front end's question. It moves no payload, so it
// has a goroutine.
func (s *ringSource) onExtents(d *Device, e *shm.SQE) {
	if errno := d.checkExtents(e); errno != blk.OK {
		s.pushAnswer(e.Tag, errno)
		return
	}
	i, off, n := s.beginRequest(d, e), e.Offset, uint64(e.Len)
	s.reqs[i].held = true // it waits for the server
	s.pump.client.watchers.Go(func() {
		list := d.extentsOrData(off, n)
		s.pump.pump.Call(func() { s.onExtentsDone(i, list) })
	})
}

// checkExtents checks a question of a front end, which is not trusted.
func (d *Device) checkExtents(e *shm.SQE) blk.Errno {
	if errno := d.checkRange(e.Offset, uint64(e.Len)); errno != blk.OK {
		return errno
	}
	if size := uint64(d.arena.Size()); e.Arena != d.index || size < extents.Size || e.ArenaOff > size-extents.Size {
		return blk.EINVAL
	}
	return blk.OK
}

// onExtentsDone answers question i. It runs on the pump. The slot belongs to the
// question until then, also if the front end that asked has gone.
func (s *ringSource) onExtentsDone(i uint32, list []extents.Extent) {
	r := &s.reqs[i]
	extents.Put(r.dev.arena.Bytes()[r.sqe.ArenaOff:], list)
	r.held = false
	s.finish(i, blk.OK, watchdog.Server)
	if !s.orphaned { // the ring of a front end that has gone may have gone, too
		s.publishAnswers()
	}
}
