package softverbs

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Phase is a part of a queue pair's life. It moves from Idle to Connecting, Up
// and Down. Idle and Connecting move to Down only by Destroy or a failed
// connect.
type Phase uint32

const (
	Idle       Phase = iota // created; receives may be posted
	Connecting              // Connect or Accept is under way
	Up                      // belongs to the owner of the completion queue; work may be posted
	Down                    // ends or has ended; nothing may be posted
)

// EndState is how far the end of a connection has come.
type EndState uint8

const (
	EndNone     EndState = iota
	EndNotified          // the last message to the peer waits for the socket
	EndFlushing          // nothing is sent or received; work is flushed
	EndDone              // OpDisconnected was returned
)

// End is how a connection ends.
type End struct {
	State  EndState
	Status verbs.Status // of OpDisconnected
	Code   uint32       // the provider's detail of a failure: VendorCode of completions
	Cause  error        // for logs; nil if the end was asked for
}

// QP is the part of a queue pair that is the same in every fabric. A provider
// embeds it. Fields and methods are for the owner of the completion queue once
// the phase is Up, and for the creator before, unless a comment names any
// goroutine.
type QP struct {
	Queued // in the Inbox of the completion queue

	Domain  *Domain
	Context uint64
	SQ      SendQueue
	RQ      RecvQueue
	End     End

	// Ops has the bit 1<<op for every opcode that the connection carries.
	Ops uint16
	// Longest is the largest payload of a request, in bytes.
	Longest uint64

	Attached bool // to the completion queue
	Listed   bool // in CQ.Ready
	Slot     int  // in CQ.Slots
	Deadline int64

	phase      atomic.Uint32
	addrs      atomic.Pointer[addrPair]
	disconnect atomic.Bool
	destroyed  atomic.Bool
}

type addrPair struct{ local, remote netip.AddrPort }

// Base returns q. It is how shared code finds it in a provider's queue pair.
func (q *QP) Base() *QP { return q }

// Limits are a device's limits for a queue pair.
type Limits struct{ QueueDepth, Elements int }

// Check returns an error if cfg is beyond l.
func (l Limits) Check(cfg *verbs.QPConfig) error {
	switch {
	case cfg.SendQueue < 0 || cfg.SendQueue > l.QueueDepth || cfg.RecvQueue < 0 || cfg.RecvQueue > l.QueueDepth:
		return fmt.Errorf("create queue pair: queues of %d and %d requests, at most %d", cfg.SendQueue, cfg.RecvQueue, l.QueueDepth)
	case cfg.MaxSGE < 0 || cfg.MaxSGE > l.Elements:
		return fmt.Errorf("create queue pair: %d elements, at most %d", cfg.MaxSGE, l.Elements)
	}
	return nil
}

// Init sets up the queues. firstSends is described at SendQueue.Init.
func (q *QP) Init(d *Domain, cfg *verbs.QPConfig, firstSends int) {
	q.Domain, q.Context = d, cfg.Context
	q.SQ.Init(cfg.SendQueue, firstSends, cfg.MaxSGE)
	q.RQ.Init(cfg.RecvQueue)
}

// ErrForeign is returned when an object of another device is passed.
var ErrForeign = errors.New("object of another device")

// Begin moves an idle queue pair to Connecting, to send private data of at most
// most bytes. The error says why that is not possible. The creator.
func (q *QP) Begin(private []byte, most int) error {
	if len(private) > most {
		return fmt.Errorf("%d bytes of private data, at most %d", len(private), most)
	}
	if !q.Move(Idle, Connecting) {
		return errors.New("queue pair was used before")
	}
	return nil
}

// Is reports whether the phase is p. Any goroutine.
func (q *QP) Is(p Phase) bool { return Phase(q.phase.Load()) == p }

// Move changes the phase if it is from, and reports whether it was. Any
// goroutine.
func (q *QP) Move(from, to Phase) bool { return q.phase.CompareAndSwap(uint32(from), uint32(to)) }

// Set changes the phase whatever it is.
func (q *QP) Set(p Phase) { q.phase.Store(uint32(p)) }

// SetAddrs sets the results of LocalAddr and RemoteAddr. Any goroutine.
func (q *QP) SetAddrs(local, remote netip.AddrPort) { q.addrs.Store(&addrPair{local, remote}) }

// LocalAddr implements verbs.QP.
func (q *QP) LocalAddr() netip.AddrPort {
	if a := q.addrs.Load(); a != nil {
		return a.local
	}
	return netip.AddrPort{}
}

// RemoteAddr implements verbs.QP.
func (q *QP) RemoteAddr() netip.AddrPort {
	if a := q.addrs.Load(); a != nil {
		return a.remote
	}
	return netip.AddrPort{}
}

// Post appends wrs to the send queue and returns how many were taken. Requests
// before the position done have finished. The phase must be Up.
func (q *QP) Post(wrs []verbs.SendWR, done uint64) (int, error) {
	for i := range wrs {
		if q.Ops>>wrs[i].Op&1 == 0 {
			return i, fmt.Errorf("post send: opcode %d: %w", wrs[i].Op, verbs.ErrUnsupported)
		}
		if err := q.SQ.Post(&wrs[i], done, q.Domain, q.Longest); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

// PostRecv implements verbs.QP.
func (q *QP) PostRecv(wrs []verbs.RecvWR) (int, error) {
	if q.Is(Down) {
		return 0, fmt.Errorf("post receive: %w", verbs.ErrNotConnected)
	}
	for i := range wrs {
		if err := q.RQ.Post(&wrs[i], q.Domain); err != nil {
			return i, err
		}
	}
	return len(wrs), nil
}

// Reap fills wcs with completions of sends that are done.
func (q *QP) Reap(wcs []verbs.WC, done uint64) int {
	n := q.SQ.Reap(wcs, done, q.Context)
	q.explainFailures(wcs[:n])
	return n
}

// explainFailures adds the provider's detail to failures.
func (q *QP) explainFailures(wcs []verbs.WC) {
	if q.End.Code == 0 {
		return
	}
	for i := range wcs {
		if wcs[i].Status != verbs.StatusOK {
			wcs[i].VendorCode = q.End.Code
		}
	}
}

// Flush returns the outstanding requests and then OpDisconnected. last reports
// whether OpDisconnected was returned: the connection is to be detached.
func (q *QP) Flush(wcs []verbs.WC, done uint64) (n int, last bool) {
	n = q.SQ.Reap(wcs, done, q.Context)
	n += q.SQ.Flush(wcs[n:], q.Context)
	n += q.RQ.Flush(wcs[n:], q.Context)
	q.explainFailures(wcs[:n])
	if n == len(wcs) || q.End.State != EndFlushing {
		return n, false
	}
	wcs[n] = verbs.WC{QP: q.Context, Op: verbs.OpDisconnected, Status: q.End.Status, VendorCode: q.End.Code}
	q.End.State = EndDone
	return n + 1, true
}

// AskDisconnect notes that the connection is to end and reports whether the
// completion queue has to be told. Any goroutine, any number of times.
func (q *QP) AskDisconnect() bool { return !q.disconnect.Swap(true) && !q.Is(Idle) }

// AskDestroy notes that the queue pair is not needed any more. It reports
// whether the completion queue has to be told; if not, the queue pair was never
// connected and is down now. Any goroutine.
func (q *QP) AskDestroy() bool {
	q.destroyed.Store(true)
	return !q.Move(Idle, Down) && !q.Move(Connecting, Down)
}

// Destroyed reports whether AskDestroy was called. Any goroutine.
func (q *QP) Destroyed() bool { return q.destroyed.Load() }

// Disconnecting reports whether AskDisconnect was called. Any goroutine.
func (q *QP) Disconnecting() bool { return q.disconnect.Load() }
