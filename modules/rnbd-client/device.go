package client

import (
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/watchdog"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// State is the state of a device. Its words are those of the kernel's control
// files.
type State uint8

const (
	Init     State = iota // being mapped
	Open                  // mapped: "open"
	Closed                // mapped, without a connection to the server: "closed"
	Unmapped              // being unmapped
)

func (s State) String() string { return [...]string{"init", "open", "closed", "unmapped"}[s] }

// Device is a mapped device.
type Device struct {
	client  *Client
	log     *slog.Logger
	index   uint32
	name    string
	path    string // on the server
	mode    blk.AccessMode
	loss    Loss
	session *session
	arena   *shm.Arena
	region  *rtrs.Region
	slot    int               // size of a slot of the arena, in bytes
	options map[string]string // of the front end, as the user gave them
	ioMode  string            // asked for by the user; empty: the server chooses
	// pollQueues is the number in the request of the mapping.
	pollQueues int
	// identity names the mapping to front ends. Later processes get the same.
	identity string

	choices []choice // of a front end, while d is being mapped

	// Read by the pumps.
	fe         atomic.Pointer[frontend]   // nil: used through NewIO
	att        atomic.Pointer[attachment] // its place at fe
	host       atomic.Pointer[host]       // the process that may send requests; nil: none, or used through NewIO
	id         atomic.Uint32              // on the server
	limits     atomic.Pointer[blk.Limits]
	gate       atomic.Uint32
	denied     atomic.Bool             // set by pumps: the server does not know the device
	sharing    atomic.Pointer[sharing] // see again.go; nil: the server has not answered
	refused    atomic.Int64            // writes not repeated by the server and not logged yet
	newsShared atomic.Uint64           // number of news that others may write
	shares     []share                 // by pump

	latency []stages // by pump; only that pump writes

	mu           sync.Mutex // taken after all other locks; held to change limits
	state        State
	openedIn     uint64 // epoch of the session in which the server opened it as id; 0: not open there
	needsRemap   bool
	reopening    bool        // reopenUntilOpen runs
	deniedOpen   bool        // closed by onDenied
	failing      bool        // open, but failed on the server
	patience     *time.Timer // timer of loss=queue; runs while closed, and not for ever
	patienceEnds time.Time
	lastError    string
	location     string // where users find it, reported by the front end
	served       uint64 // last size from the server, in bytes
	known        *known // nil: not opened yet
	asking       bool   // askAgain runs
}

// share is the part of a device that belongs to one pump.
type share struct {
	// Only that pump writes these fields.
	inflight atomic.Int64  // requests of front ends without an answer
	rx, tx   atomic.Uint64 // 512-byte sectors read, written
	failures watchdog.Failures

	// Owned by the pump: lane.go.
	waiting list
	sent    int      // requests that hold a permit
	placed  bool     // it is in a list of devices
	next    *Device  // in that list
	_       [64]byte // the next share is on another cache line
}

// newShares makes a share for each pump.
func newShares(pumps int) []share {
	all := make([]share, pumps)
	for i := range all {
		all[i].waiting = emptyList()
	}
	return all
}

// stages are the latencies of a device's requests on one pump.
type stages struct {
	queue latency.Ops // from the front end's ring to sending
	wire  latency.Ops // from sending to the answer
}

func (s *share) count(e *shm.SQE) {
	switch e.Op {
	case blk.Read:
		s.rx.Add(uint64(e.Len) / blk.SectorSize)
	case blk.Write:
		s.tx.Add(uint64(e.Len) / blk.SectorSize)
	}
}

// Name returns the device's name on this host, such as "rnbd0".
func (d *Device) Name() string { return d.name }

// Limits returns the limits last received from the server.
func (d *Device) Limits() blk.Limits { return *d.limits.Load() }

// State returns the device's state now.
func (d *Device) State() State {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state
}

// moves are the possible changes of state.
var moves = map[State][]State{
	Init:   {Open, Unmapped},
	Open:   {Closed, Unmapped},
	Closed: {Open, Unmapped},
}

// setState changes the state if moves has that change. The caller holds mu.
func (d *Device) setState(to State) {
	for _, ok := range moves[d.state] {
		if ok == to {
			d.log.Info("device state", "from", d.state.String(), "to", to.String())
			d.recordState(to)
			d.state = to
			return
		}
	}
	panic(fmt.Sprintf("device %s: no way from %s to %s", d.name, d.state, to))
}

// Location returns the place of the device for users: a path or a URI, empty if
// it is not known.
func (d *Device) Location() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.location
}

// setLocation stores the location reported by a front end.
func (d *Device) setLocation(location string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.location = location
}

func (d *Device) setGate(g gate) {
	d.gate.Store(g)
	d.client.gates.Add(1)
	d.client.wake()
}

func (d *Device) inflight() (n int64) {
	for i := range d.shares {
		n += d.shares[i].inflight.Load()
	}
	return n
}

// slotSize returns the size of a slot of the arena, in bytes. It is fixed when
// the device is mapped, and a whole number of pages.
func (d *Device) slotSize() int { return d.slot }

// maxIO returns the size of the largest request that the server takes now, in
// bytes. It is a whole number of pages.
func (s *session) maxIO() int { return min(s.transport.MaxIOSize(), maxIOSize) &^ 4095 }

// maxIOSize is the limit of the kernel's client: 128 pages.
const maxIOSize = 128 * 4096

// makeArena reserves the memory of the device's slots. The system allocates
// it when it is used.
func (d *Device) makeArena(slots int) error {
	size := int(d.Limits().MaxIOSize)
	if size == 0 {
		return fmt.Errorf("the server's largest request of %d bytes is smaller than a page: %w", d.session.transport.MaxIOSize(), syscall.EINVAL)
	}
	a, err := shm.NewArena("rnbd-"+d.name, slots*size)
	if err != nil {
		return err
	}
	r, err := d.session.transport.Register(a.Bytes())
	if err != nil {
		a.Close()
		return err
	}
	d.arena, d.region, d.slot = a, r, size
	return nil
}

func (d *Device) freeArena() {
	if d.region != nil {
		d.region.Close()
	}
	if d.arena != nil {
		d.arena.Close()
	}
}
