package diskio

// DATA PATH. An engine runs a bounded number of requests at once, and a disk
// that hangs must not occupy all of its workers. So each disk has a share, and
// the requests beyond it wait here, in order.

import "github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"

// list is a FIFO of requests by tag, chained by op.next.
type list struct{ head, tail int32 }

var empty = list{-1, -1}

func (l *list) push(ops []op, o *op) {
	tag := int32(o.req.Tag)
	o.next = -1
	if l.head < 0 {
		l.head = tag
	} else {
		ops[l.tail].next = tag
	}
	l.tail = tag
}

// pop takes the first request out of a list that has one.
func (l *list) pop(ops []op) *op {
	o := &ops[l.head]
	if l.head = o.next; l.head < 0 {
		l.tail = -1
	}
	return o
}

// share is a disk's share of the workers. It lasts as long as the disk has
// requests that count.
type share struct {
	disk    Planner
	running int  // requests that the engine has, or that go on there
	waiting list // for a worker
}

// throttle divides the workers of an engine.
type throttle struct {
	busy   int      // requests of all disks that the engine has
	shares []*share // of disks with requests
	turn   int      // of the shares; grows
	spare  []*share
}

// newThrottle has room for a disk per request.
func newThrottle(depth int) throttle {
	t := throttle{shares: make([]*share, 0, depth), spare: make([]*share, depth)}
	all := make([]share, depth)
	for i := range all {
		t.spare[i] = &all[i]
	}
	return t
}

// fits reports whether s may have one more of the engine's workers. One half of them is
// kept for disks that have few; of the other half a disk has at most as many as are
// free besides.
func (t *throttle) fits(s *share, workers int) bool {
	free := workers - t.busy
	return free > 0 && (s.running < max(workers/16, 1) || s.running < free-workers/2)
}

// of returns the share of a disk.
func (t *throttle) of(disk Planner) *share {
	for _, s := range t.shares {
		if s.disk == disk {
			return s
		}
	}
	s := t.spare[len(t.spare)-1]
	t.spare = t.spare[:len(t.spare)-1]
	*s = share{disk: disk, waiting: empty}
	t.shares = append(t.shares, s)
	return s
}

// admit submits a step to the engine, now or when a worker is free for its disk.
func (q *queue) admit(o *op) {
	workers := q.workers(o.step.Op)
	if o.share != nil || workers == 0 {
		q.submit(o)
		return
	}
	s := q.of(o.disk)
	if s.waiting != empty || !q.fits(s, workers) {
		s.waiting.push(q.ops, o)
		return
	}
	q.takeWorker(s, o)
}

func (q *queue) workers(op uring.Op) int { return q.engine.Workers(op) }

// takeWorker takes a worker for s and submits o.
func (q *queue) takeWorker(s *share, o *op) {
	o.share = s
	s.running++
	q.busy++
	q.submit(o)
}

// giveWorker gives back a worker of s, and submits the requests that have room now, one of each
// disk.
func (q *queue) giveWorker(s *share) {
	s.running--
	q.busy--
	q.turn++
	for i, n := 0, len(q.shares); i < n && len(q.shares) > 0; i++ {
		next := q.shares[(q.turn+i)%len(q.shares)]
		if next.waiting == empty || !q.fits(next, q.workers(q.ops[next.waiting.head].step.Op)) {
			continue
		}
		q.takeWorker(next, next.waiting.pop(q.ops))
	}
	if s.disk != nil && s.running == 0 && s.waiting == empty {
		q.remove(s)
	}
}

// remove forgets the share of a disk without requests.
func (t *throttle) remove(s *share) {
	s.disk = nil
	last := len(t.shares) - 1
	for i := range t.shares {
		if t.shares[i] == s {
			t.shares[i] = t.shares[last]
			break
		}
	}
	t.shares = t.shares[:last]
	t.spare = append(t.spare, s)
}
