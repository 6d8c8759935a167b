package main

import (
	"slices"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// DATA PATH of disks with the setting zero_copy, where the driver has
// AUTO_BUF_REG. The driver does not copy then: the pages of a request are a
// registered buffer of the queue's io_uring. Only operations of that ring can
// use it. The daemon needs the payload in the arena, so the ring copies it once
// between the pages and the arena's file:
//
//	onFetch -> move -> onMoved -> submit    a write
//	onDone  -> move -> onMoved -> answer    a read

const (
	movedPages = 1 << 63 // in the user data of a move, beside the tag's
	mostPages  = 1 << 14 // registered buffers of one ring, the kernel's limit
)

// copyPayload starts the copy of a request's payload: from its pages to its slot for a
// write, back for a read.
func (q *queue) copyPayload(t *requestTag) {
	t.state = tagMoving
	q.pushCommand(t)
}

func (t *requestTag) setMove(s *uring.SQE) {
	file := t.part.dev.arenaFD
	if t.entry.Op == blk.Write {
		s.WritePages(file, t.n, t.entry.ArenaOff, t.bufferIndex())
	} else {
		s.ReadPages(file, t.n, t.entry.ArenaOff, t.bufferIndex())
	}
	s.UserData = t.entry.Tag | movedPages
}

// bufferIndex returns the index of the tag's pages in the ring's table.
func (t *requestTag) bufferIndex() uint16 { return uint16(t.part.buffer) + uint16(t.entry.Tag) }

// onMoved continues a request after move. res is the number of bytes moved, or a
// negative errno.
func (q *queue) onMoved(userData uint64, res int32) {
	_, t := q.findTag(userData)
	switch {
	case t == nil || t.state != tagMoving:
		q.stats.stray.Add(1)
	case res != int32(t.n):
		q.log.Error("payload was not moved as a whole", "device", t.part.dev.name, "op", t.entry.Op, "bytes", t.n, "result", res)
		q.commitTag(t, blk.EIO)
	case t.entry.Op == blk.Write:
		t.state = tagSent
		q.submit(t)
	default:
		q.commitTag(t, blk.OK)
	}
}

// reservePages assigns indices of the ring's table to the pages of p's tags. p
// is not in q.parts yet. It returns ENOSPC if the disks of this ring use all.
func (q *queue) reservePages(p *hardwareQueue) blk.Errno {
	if !p.pages {
		return blk.OK
	}
	if !q.pages {
		if err := q.drv.ReserveBuffers(mostPages); err != nil {
			q.log.Error("no room for the pages of requests", "err", err)
			return blk.ToErrno(err)
		}
		q.pages = true
	}
	others := slices.DeleteFunc(slices.Clone(q.parts), func(o *hardwareQueue) bool { return o == nil || !o.pages })
	slices.SortFunc(others, func(a, b *hardwareQueue) int { return a.buffer - b.buffer })
	p.buffer = 0
	for _, o := range others {
		if o.buffer-p.buffer >= len(p.tags) {
			break
		}
		p.buffer = o.buffer + len(o.tags)
	}
	if p.buffer+len(p.tags) > mostPages {
		return blk.ENOSPC
	}
	return blk.OK
}
