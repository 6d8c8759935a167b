package iwarp

import (
	"io"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/softverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tally"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// DATA PATH. Receiving. One call fills the rest of the payload that is being
// received and then the staging buffer. That is parsed segment by segment. A
// segment is a header, a payload that is placed as it comes, and a tail with
// pad and CRC. Nothing is delivered before the tail has been checked. A segment
// meets, in this order:
//
//	receive          parses and reads until there is nothing more
//	fill             one recvfrom or recvmsg
//	parseHeader      the rules of check.go; the place of the payload
//	placeStaged      staged payload is moved by place
//	finishSegment    checks the tail
//	deliver          check.go: completes messages

const (
	// stageSize is the staging buffer of a connection in bytes. It has
	// stageFirst until that many came at once.
	stageSize  = 256 << 10
	stageFirst = 16 << 10
	// bulkMin is the payload in bytes from which a segment counts as part of a
	// large message: little is staged behind it, so that the next payload is
	// received in place.
	bulkMin = 16 << 10
	// bulkStage is how many bytes are staged between large messages: payload
	// that comes with its header is copied.
	bulkStage = 512
	// directMin is the rest of a payload in bytes from which it is received in
	// place.
	directMin = 512
	// readBudget is how many bytes one call takes from one connection.
	readBudget = 1 << 20
)

type rxPhase uint8

const (
	rxHeader rxPhase = iota
	rxPayload
	rxTail
)

// parseVerdict is the reason why parsing stopped.
type parseVerdict uint8

const (
	rxMore    parseVerdict = iota // needs bytes
	rxFull                        // no room for completions
	rxNoRecv                      // a message waits for a receive
	rxStopped                     // the connection ends
)

// receiveHalf is the receiving half of a connection.
type receiveHalf struct {
	stage []byte
	r, w  int // unparsed bytes
	v     iovecList
	crcOn bool

	phase rxPhase
	// The segment in progress.
	head [fpduUntagged]byte
	op   opcode
	last bool
	bulk bool   // the last payload of a Write was large
	left int    // payload to come
	dst  []byte // where the next of it goes
	// final is where the payload goes when its CRC is right, if that memory is read by
	// others (verbs.Guarded): until then it is in side. nil: the payload goes there at once.
	final, side []byte
	// control reports that dst is ctl: the payload is for the provider.
	control bool
	region  *softverbs.Region
	tail    int
	crc     uint32
	err     termCode // the rule that is broken; payload is not placed
	ctl     [maxTerminateLen]byte

	// Messages in progress, at most one of each class.
	tagged   taggedMessage
	untagged untaggedMessage
	msn      [3]uint32 // expected MSN of each queue

	lastWrite uint32 // length of the Write right before, for Immediate Data
	met       bool   // a valid FPDU came
}

type taggedMessage struct {
	open   bool
	op     opcode
	stag   uint32
	next   uint64 // expected TO
	length uint32
}

type untaggedMessage struct {
	open   bool
	op     opcode
	length uint32
}

func (x *receiveHalf) init(crcOn bool) {
	x.stage = make([]byte, stageFirst)
	x.v = newVec(2)
	x.crcOn = crcOn
	x.msn = [3]uint32{1, 1, 1}
}

// midMessage reports whether a message is incomplete.
func (x *receiveHalf) midMessage() bool {
	return x.phase != rxHeader || x.r != x.w || x.tagged.open || x.untagged.open
}

// receive parses and reads until there is nothing more, wcs is full or the
// budget is used. It returns the number of completions.
func (q *qp) receive(wcs []verbs.WC) int {
	n := 0
	for budget := readBudget; ; {
		m, v := q.parse(wcs[n:])
		n += m
		q.more = v == rxFull
		if v != rxMore || !q.canFill() || budget <= 0 {
			return n
		}
		budget -= q.fillStaging()
	}
}

// fillStaging reads from the socket once and returns the number of bytes.
func (q *qp) fillStaging() int {
	x := &q.rx
	if q.tls != nil {
		return q.fillRecords()
	}
	x.w = copy(x.stage, x.stage[x.r:x.w]) // at most a part of a header or a tail
	x.r = 0
	vecs, direct := 0, 0
	if x.phase == rxPayload && len(x.dst) >= directMin && q.payloadReachable() {
		direct = len(x.dst)
		x.v.setEntry(0, x.dst)
		vecs = 1
	}
	room := x.stagingRoom(direct)
	x.v.setEntry(vecs, x.stage[x.w:][:room])
	got, errno := x.v.recv(q.fd, vecs+1)
	if got == 0 && errno == 0 {
		q.peerGone(io.EOF)
		return 0
	}
	if !q.checkReceived(got, direct+room, errno) {
		return 0
	}
	x.w += x.accountReceived(got, direct, &q.cq.stats.direct)
	if x.w == len(x.stage) {
		x.widenStaging()
	}
	return got
}

// checkReceived judges a receive call with room for so many bytes and reports whether it
// has got some. The call has not found the end of the stream.
func (q *qp) checkReceived(got, room int, errno unix.Errno) bool {
	switch errno {
	case 0:
	case unix.EAGAIN:
		q.readable = false
		return false
	case unix.EINTR:
		return false
	default:
		q.peerGone(errno)
		return false
	}
	if got < room && !q.hangup {
		q.readable = false // the socket is empty: the next bytes raise a new edge
	}
	q.quiet = 0
	q.cq.stats.received.Add(uint64(got))
	return true
}

// widenStaging gives x the whole staging buffer.
func (x *receiveHalf) widenStaging() {
	if len(x.stage) < stageSize {
		stage := make([]byte, stageSize)
		copy(stage, x.stage[:x.w])
		x.stage = stage
	}
}

// stagingRoom returns how many bytes to stage behind direct bytes of payload. Inside a
// large message that is the tail and the next header.
func (x *receiveHalf) stagingRoom(direct int) int {
	switch {
	case direct >= bulkMin && direct == x.left && !x.last:
		return x.tail + fpduHeader(x.head[:]).size()
	case (direct >= bulkMin || x.bulk) && x.w < bulkStage:
		return bulkStage - x.w
	}
	return len(x.stage) - x.w
}

// accountReceived accounts for got bytes, the first direct of them received in place,
// and returns the number of staged bytes.
func (x *receiveHalf) accountReceived(got, direct int, counter *tally.Count) int {
	d := min(got, direct)
	if d == 0 {
		return got
	}
	if x.crcOn {
		x.crc = crcUpdate(x.crc, x.dst[:d])
	}
	x.dst = x.dst[d:]
	x.left -= d
	counter.Add(uint64(d))
	return got - d
}

// parse parses the staging buffer. It returns the number of completions.
func (q *qp) parse(wcs []verbs.WC) (n int, v parseVerdict) {
	x := &q.rx
	for q.End.State == softverbs.EndNone {
		switch x.phase {
		case rxHeader:
			if v := q.parseHeader(); v != rxMore || x.phase == rxHeader {
				return n, v
			}
		case rxPayload:
			q.placeStaged()
			if x.left > 0 {
				return n, rxMore
			}
			x.phase = rxTail
		case rxTail:
			if x.w-x.r < x.tail {
				return n, rxMore
			}
			if n == len(wcs) {
				return n, rxFull
			}
			n += q.finishSegment(wcs[n:])
		}
	}
	return n, rxStopped
}

// parseHeader begins a segment if its header is complete.
func (q *qp) parseHeader() parseVerdict {
	x := &q.rx
	h := fpduHeader(x.stage[x.r:x.w])
	if len(h) < 4 {
		return rxMore
	}
	if h.payload() < 0 || h.op() == opReadRequest && !h.tagged() && h.payload() < readRequestLen {
		q.terminate(termFraming)
		return rxStopped
	}
	size := h.size()
	if len(h) < size {
		return rxMore
	}
	copy(x.head[:], h[:size])
	x.op, x.last, x.left, x.tail = h.op(), h.last(), h.payload(), h.tail()
	x.dst, x.final, x.region, x.control = nil, nil, nil, false
	if x.err = q.beginSegment(); x.err == termNoBuffer {
		return q.waitForRecv()
	}
	if x.err == 0 && len(x.dst) > x.left {
		x.dst = x.dst[:x.left]
	}
	if x.crcOn && x.region != nil && x.region.Guarded() {
		x.final, x.dst = x.dst, x.apart(len(x.dst))
	}
	if x.op == opWrite && x.left > 0 && !x.tagged.open {
		x.bulk = x.left >= bulkMin
	}
	q.stopWaiting()
	if x.err != 0 && !x.crcOn {
		q.refuseSegment()
		return rxStopped
	}
	if x.crc = 0; x.crcOn {
		x.crc = crcUpdate(0, h[:size])
	}
	x.r += size
	x.phase = rxPayload
	return rxMore
}

// apart returns memory for n bytes of payload that is not verified.
func (x *receiveHalf) apart(n int) []byte {
	if len(x.side) < n {
		x.side = make([]byte, n)
	}
	return x.side[:n]
}

// placeApart places the payload that has been verified apart.
func (q *qp) placeApart() {
	if x := &q.rx; q.payloadReachable() {
		q.cq.place(x.final, x.side[:len(x.final)])
		x.final = nil
	}
}

// waitForRecv leaves the header where it is and stops reading, so that the flow
// control of TCP stops the peer until a receive is posted.
func (q *qp) waitForRecv() parseVerdict {
	if q.rnrSince == 0 {
		q.rnrSince = q.cq.Now()
		q.cq.waiting++
		if q.dev.cfg.RNRTimeout > 0 {
			q.setDeadline(q.rnrSince + int64(q.dev.cfg.RNRTimeout))
		}
		if q.hangup {
			q.waitLess()
		}
	}
	return rxNoRecv
}

// hangupGrace is how long a message waits for a receive after its peer has
// closed the connection.
const hangupGrace = 100 * time.Millisecond

// waitLess shortens the wait for a receive when the peer has closed the
// connection.
func (q *qp) waitLess() {
	if t := q.cq.Now() + int64(hangupGrace); q.Deadline == 0 || t < q.Deadline {
		q.setDeadline(t)
	}
}

// stopWaiting ends the wait for a receive.
func (q *qp) stopWaiting() {
	if q.rnrSince != 0 {
		q.rnrSince = 0
		q.cq.waiting--
		q.setDeadline(0)
	}
}

// placeStaged places the staged part of the payload.
func (q *qp) placeStaged() {
	x := &q.rx
	for x.left > 0 && x.r < x.w {
		src := x.stage[x.r:min(x.w, x.r+x.left)]
		if x.err == 0 && q.payloadReachable() {
			if len(x.dst) == 0 {
				q.nextPiece()
			}
			src = src[:min(len(src), len(x.dst))]
			if x.control {
				copy(x.dst, src)
			} else {
				q.cq.place(x.dst, src)
			}
			x.dst = x.dst[len(src):]
		}
		if x.crcOn {
			x.crc = crcUpdate(x.crc, src)
		}
		x.r += len(src)
		x.left -= len(src)
	}
}

// place copies payload from the staging buffer to where it belongs. It is the
// only copy of payload in this package.
func (c *compQueue) place(dst, src []byte) {
	copy(dst, src)
	c.stats.placed.Add(uint64(len(src)))
}

// payloadReachable reports whether the payload may still be placed. The region of a
// Write may lose its key while the payload arrives.
func (q *qp) payloadReachable() bool {
	x := &q.rx
	if x.err != 0 {
		return false
	}
	if x.region != nil && !x.region.Valid(fpduHeader(x.head[:]).stag()) {
		x.err = termSTag
		x.dst = nil
		return false
	}
	return true
}

// nextPiece sets dst to the next piece of the elements of the READ that the
// peer answers.
func (q *qp) nextPiece() {
	r := &q.reads[q.readHead%uint64(len(q.reads))]
	q.rx.dst = r.at.Next(q.SQ.Elements(r.entry), q.rx.left)
}

// finishSegment checks the tail and delivers. It returns the number of
// completions, at most one.
func (q *qp) finishSegment(wcs []verbs.WC) int {
	x := &q.rx
	tail := x.stage[x.r : x.r+x.tail]
	x.r += x.tail
	x.phase = rxHeader
	if x.crcOn {
		pad := x.tail - crcLen
		if crcUpdate(x.crc, tail[:pad]) != getCRC(tail[pad:]) {
			q.cq.stats.crcErrors.Add(1)
			q.terminate(termCRC)
			return 0
		}
	}
	if x.final != nil {
		q.placeApart()
	}
	if x.err != 0 {
		q.refuseSegment()
		return 0
	}
	if !x.met {
		q.firstFrame()
	}
	return q.deliverSegment(wcs)
}

// firstFrame resumes the work that waited for the first FPDU of the peer.
func (q *qp) firstFrame() {
	q.rx.met = true
	q.tx.hold = false
	if q.terms.poke {
		q.terms.poke = false
		q.setDeadline(0)
	}
	q.cq.activate(q)
}

// refuseSegment ends the connection with a Terminate that quotes the segment in
// progress.
func (q *qp) refuseSegment() {
	q.tx.off.setHeader(q.rx.head[:])
	q.terminate(q.rx.err)
}
