package main

import (
	"encoding/binary"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
)

// DATA PATH, block status: the ranges that hold data. The command takes a slot as a read
// does, and asks about the whole blocks around its range. The host writes a list of
// extents to the slot, and the payload of the reply takes the place of the list:
//
//	clearList                                    before the request
//	onDone -> answerStatus -> clip, putStatus    behind it
//
// A range is data unless a list says clearly that it is a hole: clients do not read
// holes, and so lose the data in one that is none.

const (
	maxStatus      = 1 << 31 // bytes of the device that one list is asked for
	statusHeadSize = 4       // context of the chunk
	statusSize     = 8       // a descriptor
)

// clearList leaves no list in o's slot: an earlier command may have brought one there,
// in the payload of a write, and the host may write none.
func (o *op) clearList() { clear(o.sh.exp.slotMemory(o.tag)[:extents.Size]) }

// answerStatus queues the reply of a block status, which ends the request. A host that
// fails, because it knows no extents or for any other reason, knows of no hole.
func (c *conn) answerStatus(o *op, errno blk.Errno) {
	slot := c.exp.slotMemory(o.tag)
	list := c.q.list[:0]
	if errno == blk.OK {
		if told, err := extents.ParseInto(list, slot, uint64(o.n)); err == nil {
			list = told
		}
	}
	from := uint64(o.skip)
	list = clipExtents(list, from, from+uint64(o.len), uint64(c.exp.minBlock()))
	if o.req.one {
		list = list[:1]
	}
	o.skip, o.len = 0, putStatus(slot, list)
	e := c.appendReply()
	nbdwire.PutChunk(e.header[:], nbdwire.ChunkDone, nbdwire.ChunkBlockStatus, o.req.cookie, o.len)
	e.n, e.op = nbdwire.ChunkSize, o
	c.endReply(e, o.req)
}

// clipExtents makes of list, from byte 0 on, one of the bytes from to to, in its
// memory. Ranges become multiples of unit, holes shorter and the others longer. If
// nothing is left, all is data.
func clipExtents(list []extents.Extent, from, to, unit uint64) []extents.Extent {
	out, at, end := list[:0], from, uint64(0)
	for _, e := range list {
		end += e.Len
		edge := end
		if !e.Hole {
			edge += unit - 1
		}
		if edge = min(edge&^(unit-1), to); edge > at {
			out, _ = extents.Add(out, edge-at, e.Hole)
			at = edge
		}
	}
	if at == from {
		out, _ = extents.Add(out, to-from, false)
	}
	return out
}

// putStatus writes the payload of a chunk of block status to b, and returns its length.
func putStatus(b []byte, list []extents.Extent) uint32 {
	binary.BigEndian.PutUint32(b, allocationID)
	n := statusHeadSize
	for _, e := range list {
		flags := uint32(0)
		if e.Hole {
			flags = nbdwire.StateHole | nbdwire.StateZero
		}
		binary.BigEndian.PutUint32(b[n:], uint32(e.Len))
		binary.BigEndian.PutUint32(b[n+4:], flags)
		n += statusSize
	}
	return uint32(n)
}
