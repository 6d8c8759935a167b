package main

// DATA PATH. A request meets these functions in this order:
//
//	reap -> onFetch       the driver has filled a tag and its slot; or without
//	                      the slot: pages.go
//	submit -> push        an entry for the daemon
//	popAnswers -> onDone  its answer
//	answer                the driver gets the result and fetches the next
//
// All of it runs on the queue's thread. One io_uring_enter per round commits all
// answers, and the driver fills the tags of requests that have come meanwhile.

import (
	"fmt"
	"log/slog"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/tally"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

const (
	batch       = 128
	commandRoom = 512       // I/O commands that are submitted at once
	largeIO     = 256 << 10 // after I/O of this size the pump does not spin
)

// submitRing is this side of a queue's ring: plugin.FrontQueue, or shm.Submitter in
// tests.
type submitRing interface {
	Fits(sent int) bool
	Push(*shm.SQE) bool
	Publish()
	Pop([]shm.CQE) int
	Arm() bool
	Disarm()
	FD() int
}

// driverRing is the io_uring to the driver, or a fake of it in tests.
type driverRing interface {
	// Next is a cleared entry; nil: the ring is full, submit first.
	Next() *uring.SQE
	Cmd(*uring.SQE) []byte
	Pending() int
	Submit() error
	Peek([]uring.CQE) int
	Arm() bool
	ReserveBuffers(int) error
}

// requestTag is one request slot of a hardware queue.
type requestTag struct {
	state tagState
	sent  bool   // the entry is in the ring
	n     uint32 // bytes of the request
	entry shm.SQE
	part  *hardwareQueue
	next  *requestTag // in a list of the queue

	op     uint32 // the command to send, and the result that it commits
	result int32
	began  int64 // time of arrival by queue.now; 0: not measured
}

// tagList is a queue of tags.
type tagList struct{ first, last *requestTag }

func (l *tagList) pushTag(t *requestTag) {
	t.next = nil
	if l.first == nil {
		l.first = t
	} else {
		l.last.next = t
	}
	l.last = t
}

type tagState uint8

const (
	tagEnded   tagState = iota // no command: not begun, or the device is stopped
	tagFetched                 // the driver has the command and the slot
	tagMoving                  // payload is on its way between the request's pages and the slot
	tagSent                    // the daemon has the request and the slot
)

// hardwareQueue is one hardware queue of a device. Its queue's thread owns it from open
// to the end of the last tag.
type hardwareQueue struct {
	dev     *ublkDevice
	queue   *queue
	id      uint32 // in queue.parts
	hw      uint16
	char    int32 // the character device
	desc    []byte
	base    uint32 // first slot
	pages   bool   // the driver registers the pages of requests: see pages.go
	buffer  int    // index of its first tag's pages in the ring's table
	tags    []requestTag
	sent    int           // requests that the daemon has
	backlog tagList       // requests that wait for room in the daemon's ring
	active  int           // tags that are not ended
	fail    bool          // new requests are answered with EIO
	ended   chan struct{} // closed when no tag is active any more
}

// queue is one pump's work: a ring of the daemon and the hardware queues that
// belong to it. It implements pump.Source; bell is the other half.
type queue struct {
	pump  int
	ring  submitRing
	drv   driverRing
	uring *uring.Ring // nil with a fake driver
	event int         // the driver's eventfd
	log   *slog.Logger
	do    func(func()) // runs a function on the queue's thread; any thread

	parts   []*hardwareQueue
	backlog []*hardwareQueue // parts with requests that wait for room in the daemon's ring
	due     tagList          // commands that wait for room in the driver's ring
	large   bool
	pages   bool // the table of registered pages is there

	answers [batch]shm.CQE
	events  [batch]uring.CQE
	token   [8]byte

	stats struct{ requests, errors, stray tally.Count }

	// Both set, or both nil: a clock in nanoseconds, and the function that
	// records the duration of each request. See plugin.FrontQueue.Served.
	now    func() int64
	served func(device uint32, op blk.Op, ns int64)
}

// newQueue makes a queue and its io_uring.
func newQueue(r submitRing, log *slog.Logger) (*queue, error) {
	u, err := uring.NewRing(commandRoom, uring.Options{CQEntries: 2 * maxQueueDepth})
	if err != nil {
		return nil, fmt.Errorf("io_uring, which the ublk driver is spoken to by: %w", err)
	}
	q := &queue{ring: r, drv: u, uring: u, log: log, event: -1}
	if q.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err == nil {
		err = u.RegisterEventfd(q.event)
	}
	if err != nil {
		q.close()
		return nil, fmt.Errorf("eventfd of an io_uring: %w", err)
	}
	return q, nil
}

func (q *queue) close() {
	if q == nil {
		return
	}
	if q.uring != nil {
		q.uring.Close()
	}
	if q.event >= 0 {
		unix.Close(q.event)
		q.event = -1
	}
}

// Poll does one round and returns the number of events that it handled.
func (q *queue) Poll() int {
	n := q.popAnswers()
	n += q.retryParked()
	if q.drv.Pending() > 0 {
		q.drv.Submit() // commands that the kernel does not take stay for the next round
	}
	n += q.reapDriver()
	q.ring.Publish()
	return n
}

// reapDriver handles the driver's completions.
func (q *queue) reapDriver() (n int) {
	for {
		k := q.drv.Peek(q.events[:])
		for i := range k {
			q.onEvent(&q.events[i])
		}
		n += k
		if k < len(q.events) {
			return n
		}
	}
}

func (q *queue) onEvent(e *uring.CQE) {
	if e.UserData&movedPages != 0 {
		q.onMoved(e.UserData&^movedPages, e.Res)
		return
	}
	p, t := q.findTag(e.UserData)
	if t == nil || t.state != tagFetched {
		q.stats.stray.Add(1)
		return
	}
	if e.Res < 0 {
		q.onEnd(p, t, e.Res)
		return
	}
	q.onFetch(p, t, e.UserData)
}

// onFetch turns a filled tag into a request to the daemon.
func (q *queue) onFetch(p *hardwareQueue, t *requestTag, userData uint64) {
	q.stats.requests.Add(1)
	i := int(uint16(userData))
	errno := t.readDescriptor(ioDesc(p.desc[i*ioDescSize:][:ioDescSize]))
	q.large = t.n >= largeIO && t.entry.Op.HasData()
	t.state = tagSent
	t.entry.Tag = userData
	t.entry.Device, t.entry.Arena = p.dev.index, p.dev.arenaID
	t.entry.ArenaOff = uint64(p.base+uint32(i)) * uint64(p.dev.slotSize)
	if errno == blk.OK && p.fail {
		errno = blk.EIO
	}
	if errno != blk.OK {
		q.commitTag(t, errno)
		return
	}
	if q.now != nil {
		t.began = q.now()
	}
	if p.pages && t.entry.Op == blk.Write {
		q.copyPayload(t)
		return
	}
	q.submit(t)
}

// readDescriptor copies the request from the driver's descriptor.
func (t *requestTag) readDescriptor(d ioDesc) blk.Errno {
	of := d.opFlags()
	t.entry = shm.SQE{Offset: d.startSector() * blk.SectorSize}
	t.n = d.sectorCount() * blk.SectorSize
	t.entry.Len = t.n
	switch of & opMask {
	case opRead:
		t.entry.Op = blk.Read
	case opWrite:
		t.entry.Op = blk.Write
	case opFlush:
		t.entry.Op = blk.Flush
		t.entry.Offset, t.entry.Len = 0, 0
	case opDiscard:
		t.entry.Op = blk.Discard
	case opWriteZeroes:
		t.entry.Op = blk.WriteZeroes
		if of&flagNoUnmap != 0 {
			t.entry.Flags |= blk.NoUnmap
		}
	default:
		return blk.EOPNOTSUPP
	}
	if of&flagFUA != 0 && (t.entry.Op == blk.Write || t.entry.Op == blk.WriteZeroes) {
		t.entry.Flags |= blk.FUA
	}
	return blk.OK
}

// submit puts the entry into the ring, or into the part's backlog while the ring
// has no room for the device.
func (q *queue) submit(t *requestTag) {
	p := t.part
	if p.backlog.first == nil {
		if q.push(t) {
			return
		}
		q.backlog = append(q.backlog, p)
	}
	p.backlog.pushTag(t)
}

// push puts the entry into the ring, if the device may have one more.
func (q *queue) push(t *requestTag) bool {
	if !q.ring.Fits(t.part.sent) || !q.ring.Push(&t.entry) {
		return false
	}
	t.sent = true
	t.part.sent++
	return true
}

// retryParked continues with tags that found a ring full.
func (q *queue) retryParked() (n int) {
	waiting := q.backlog[:0]
	for _, p := range q.backlog {
		for l := &p.backlog; l.first != nil && q.push(l.first); l.first = l.first.next {
			n++
		}
		if p.backlog.first != nil {
			waiting = append(waiting, p)
		}
	}
	if k := len(waiting); k > 1 { // each has the first try in one of the rounds
		first := waiting[0]
		copy(waiting, waiting[1:])
		waiting[k-1] = first
	}
	q.backlog = waiting
	for l := &q.due; l.first != nil && q.tryPushCommand(l.first); l.first = l.first.next {
		n++
	}
	return n
}

// popAnswers handles the daemon's completions.
func (q *queue) popAnswers() (n int) {
	for {
		k := q.ring.Pop(q.answers[:])
		for i := range k {
			q.onDone(&q.answers[i])
		}
		n += k
		if k < len(q.answers) {
			return n
		}
	}
}

// onDone handles a completion of the daemon. The daemon is not trusted: a
// completion without a request in the ring is counted and dropped.
func (q *queue) onDone(c *shm.CQE) {
	_, t := q.findTag(c.Tag)
	if t == nil || !t.sent {
		q.stats.stray.Add(1)
		return
	}
	t.sent = false
	t.part.sent--
	errno := blk.Errno(c.Errno)
	if uint32(errno) != c.Errno {
		errno = blk.EIO
	}
	if errno == blk.OK && t.part.pages && t.entry.Op == blk.Read {
		q.copyPayload(t)
		return
	}
	q.commitTag(t, errno)
}

// commitTag commits the result of a request and fetches the next one.
func (q *queue) commitTag(t *requestTag, errno blk.Errno) {
	n := int32(0)
	if t.entry.Op.HasData() {
		n = int32(t.n)
	}
	if errno != blk.OK {
		q.stats.errors.Add(1)
	}
	if t.began != 0 {
		q.served(t.part.dev.index, t.entry.Op, q.now()-t.began)
		t.began = 0
	}
	q.queueCommand(t, t.part.dev.again, commitResult(errno, n))
}

// queueCommand gives a tag to the driver.
func (q *queue) queueCommand(t *requestTag, op uint32, result int32) {
	t.op, t.result = op, result
	t.state = tagFetched
	q.pushCommand(t)
}

// pushCommand puts a tag's next command into the driver's ring, or into the list due
// while the ring is full.
func (q *queue) pushCommand(t *requestTag) {
	if q.due.first != nil || !q.tryPushCommand(t) {
		q.due.pushTag(t)
	}
}

// tryPushCommand writes a tag's next entry: the move of its payload, or a command with
// its slot as the buffer. It returns false if the ring is full.
func (q *queue) tryPushCommand(t *requestTag) bool {
	s := q.drv.Next()
	if s == nil {
		q.drv.Submit()
		if s = q.drv.Next(); s == nil {
			return false
		}
	}
	if t.state == tagMoving {
		t.setMove(s)
		return true
	}
	p, i := t.part, uint16(t.entry.Tag)
	s.URingCmd(p.char, t.op)
	s.UserData = t.entry.Tag
	addr := p.dev.slotAddr(p.base + uint32(i))
	if p.pages {
		s.Addr, addr = autoBufReg(t.bufferIndex()), 0
	}
	putIO(q.drv.Cmd(s), p.hw, i, t.result, addr)
	return true
}

// findTag returns the part and tag that user data names, nil if there are none.
func (q *queue) findTag(userData uint64) (*hardwareQueue, *requestTag) {
	id, i := userData>>16, uint16(userData)
	if id >= uint64(len(q.parts)) || q.parts[id] == nil || int(i) >= len(q.parts[id].tags) {
		return nil, nil
	}
	p := q.parts[id]
	return p, &p.tags[i]
}

// openPart begins to serve p: the driver gets a fetch command for every tag. Queue's
// thread.
func (q *queue) openPart(p *hardwareQueue) {
	p.id = uint32(len(q.parts))
	for i, other := range q.parts {
		if other == nil {
			p.id = uint32(i)
			break
		}
	}
	if int(p.id) == len(q.parts) {
		q.parts = append(q.parts, nil)
		q.backlog = slices.Grow(q.backlog, len(q.parts)) // each at most once: submit allocates nothing
	}
	refused := q.reservePages(p)
	q.parts[p.id] = p
	p.active = len(p.tags)
	for i := range p.tags {
		t := &p.tags[i]
		t.part, t.entry.Tag = p, uint64(p.id)<<16|uint64(i)
		if refused != blk.OK {
			q.onEnd(p, t, -int32(refused))
			continue
		}
		q.queueCommand(t, p.dev.fetch, -1)
	}
}

// onEnd handles the last completion of a tag: the device stops, or the driver
// has refused the command.
func (q *queue) onEnd(p *hardwareQueue, t *requestTag, res int32) {
	if res != resAbort {
		p.dev.recordErrno(-res)
	}
	t.state = tagEnded
	if p.active--; p.active == 0 {
		q.parts[p.id] = nil
		close(p.ended)
	}
}

// Arm arranges for FD to become readable at the driver's next completion. It
// returns false if there is one now.
func (q *queue) Arm() bool {
	unix.Read(q.event, q.token[:])
	return q.drv.Arm()
}

func (q *queue) FD() int       { return q.event }
func (q *queue) LargeIO() bool { return q.large }

// ringBell is a second source of the pump, so that the pump can sleep on the
// daemon's ring too; the queue's Poll handles the entries. Where there is no
// io_uring it is the only source, so that the pump notices the end of the ring.
type ringBell struct{ submitRing }

func (b *ringBell) Poll() int { return b.Pop(nil) }
