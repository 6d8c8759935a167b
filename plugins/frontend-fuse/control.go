package main

import (
	"os"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
)

// Requests about the file itself, answered at once, and the search for data and holes.

// control answers a request that needs nothing of the daemon.
func (q *queue) control(d *device, m inMessage) {
	switch m.opcode() {
	case opForget, opBatchForget, opInterrupt, opDestroy: // without an answer
	case opInit:
		putInitOut(q.body[:], m.args(), d.maxWrite)
		q.answer(d, m.unique(), blk.OK, q.body[:initOutSize])
	case opGetattr:
		q.answerAttr(d, m)
	case opSetattr:
		q.setAttr(d, m)
	case opOpen:
		q.open(d, m)
	case opRelease:
		d.opens.Add(-1)
		q.answer(d, m.unique(), blk.OK, nil)
	case opFlush: // close(2) makes nothing durable
		q.answer(d, m.unique(), blk.OK, nil)
	case opStatfs:
		putStatfsOut(q.body[:], d.limits.Load().Size)
		q.answer(d, m.unique(), blk.OK, q.body[:statfsOutSize])
	default:
		q.answer(d, m.unique(), blk.Errno(unix.ENOSYS), nil)
	}
}

func (q *queue) answerAttr(d *device, m inMessage) {
	l := d.limits.Load()
	putAttrOut(q.body[:], &fileAttr{size: l.Size, block: uint32(d.block), uid: uint32(os.Geteuid()), gid: uint32(os.Getegid()), readOnly: l.ReadOnly})
	q.answer(d, m.unique(), blk.OK, q.body[:attrOutSize])
}

// setAttr refuses changes of size, mode and owner. Times are not kept.
func (q *queue) setAttr(d *device, m inMessage) {
	valid, size := native.Uint32(m.args()), native.Uint64(m.args()[16:])
	if valid&(setattrMode|setattrUID|setattrGID) != 0 || valid&setattrSize != 0 && size != d.limits.Load().Size {
		q.answer(d, m.unique(), blk.EPERM, nil)
		return
	}
	q.answerAttr(d, m)
}

// open lets a user open the file. A device that may only be read is not opened for
// writing.
func (q *queue) open(d *device, m inMessage) {
	if native.Uint32(m.args())&unix.O_ACCMODE != unix.O_RDONLY && d.limits.Load().ReadOnly {
		q.answer(d, m.unique(), blk.EROFS, nil)
		return
	}
	d.opens.Add(1)
	clear(q.body[:openOutSize])
	native.PutUint32(q.body[8:], openDirectIO|openParallelWrites)
	q.answer(d, m.unique(), blk.OK, q.body[:openOutSize])
}

// seek handles one list of extents of a request that looks for data or a hole. If the
// list has the place, the request ends there; else it goes on behind the list. A host
// that knows no extents knows of no hole.
func (q *queue) seek(d *device, r *request, o *op) {
	if r.errno != blk.OK {
		r.errno = blk.OK
		r.found(r.start, r.whence == unix.SEEK_HOLE)
		return
	}
	list, err := extents.Parse(o.memory(), uint64(o.n))
	if err != nil {
		r.found(r.start, r.whence == unix.SEEK_HOLE)
		return
	}
	at := o.off
	for _, e := range list {
		end := at + e.Len
		if e.Hole == (r.whence == unix.SEEK_HOLE) && end > r.start && at < r.end {
			r.found(max(at, r.start), false)
			return
		}
		at = end
	}
	if at = min(at, r.end); at == r.end {
		r.notFound()
		return
	}
	r.start, r.next = at, at
}

// found ends a seek at off, or at the end of the device: a hole lies behind it.
func (r *request) found(off uint64, end bool) {
	if end {
		off = r.end
	}
	r.start, r.next = off, r.end
}

// notFound ends a seek without a result: the hole behind the end, or no data.
func (r *request) notFound() {
	if r.whence == unix.SEEK_HOLE {
		r.found(0, true)
		return
	}
	r.fail(blk.ENXIO)
}
