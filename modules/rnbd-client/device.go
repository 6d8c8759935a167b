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
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// State of a device; the words are those of the kernel's control files.
type State uint8

const (
	Init     State = iota // being mapped
	Open                  // mapped: "open"
	Closed                // mapped, but the server is not reached: "closed"
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
	slot    int               // bytes of one of the arena's
	options map[string]string // of the front end, as the user gave them
	ioMode  string            // that the user wishes; empty: the server chooses
	// pollQueues is what the mapping asked for.
	pollQueues int
	// identity names the mapping to front ends, beyond the end of processes.
	identity string

	choices []choice // of a front end, while d is being mapped

	// Read by the pumps.
	fe         atomic.Pointer[frontend]   // nil: used through NewIO
	att        atomic.Pointer[attachment] // at fe
	host       atomic.Pointer[host]       // the process that may send requests; nil: none, or used through NewIO
	id         atomic.Uint32              // on the server
	limits     atomic.Pointer[blk.Limits]
	gate       atomic.Uint32
	denied     atomic.Bool             // set by them: the server does not know the device
	sharing    atomic.Pointer[sharing] // see again.go; nil: the server does not say
	refused    atomic.Int64            // writes that the server did not repeat, and that are not reported yet
	newsShared atomic.Uint64           // how often the server has told that others may write
	shares     []share                 // by pump

	latency []stages // by pump; only that pump writes

	mu         sync.Mutex // the last to take; changes of limits are made with it
	state      State
	openedIn   uint64 // the session's epoch in which the server opened it as id; 0: not open there
	needsRemap bool
	reopening  bool        // by reopenUntilOpen
	deniedOpen bool        // closed by onDenied
	failing    bool        // open, but the server says that it has failed
	patience   *time.Timer // of loss=queue; runs while closed
	lastError  string
	location   string // where users find it, as the front end says
	served     uint64 // the size in bytes that the server told last
	known      *known // nil: not opened yet
	asking     bool   // askAgain is at work
}

// share is what one pump knows of a device.
type share struct {
	// Only that pump writes these.
	inflight atomic.Int64  // requests of front ends without an answer
	rx, tx   atomic.Uint64 // 512-byte sectors read, written

	// Of the pump's owner: lane.go.
	waiting list
	sent    int      // requests that hold a permit
	placed  bool     // in a list of devices
	next    *Device  // there
	_       [64]byte // the next share is on another cache line
}

// newShares makes one for each pump.
func newShares(pumps int) []share {
	all := make([]share, pumps)
	for i := range all {
		all[i].waiting = emptyList()
	}
	return all
}

// stages are where the time of a device's requests goes on one pump.
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

// Name is the device's name on this host, as "rnbd0".
func (d *Device) Name() string { return d.name }

// Limits are what the device can do, by the server's word.
func (d *Device) Limits() blk.Limits { return *d.limits.Load() }

// State returns the device's state now.
func (d *Device) State() State {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.state
}

// moves are the changes of state that happen.
var moves = map[State][]State{
	Init:   {Open, Unmapped},
	Open:   {Closed, Unmapped},
	Closed: {Open, Unmapped},
}

// setState refuses moves that make no sense. Caller holds mu.
func (d *Device) setState(to State) {
	for _, ok := range moves[d.state] {
		if ok == to {
			d.log.Info("device state", "from", d.state.String(), "to", to.String())
			d.state = to
			return
		}
	}
	panic(fmt.Sprintf("device %s: no way from %s to %s", d.name, d.state, to))
}

// Location is where users find the device: a path, a URI. Empty: not known.
func (d *Device) Location() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.location
}

// setLocation takes over where a front end shows d.
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

// slotSize is the size of a slot of the arena, as the device was mapped: a whole
// number of pages.
func (d *Device) slotSize() int { return d.slot }

// maxIO is the largest request that the server takes now, a whole number of pages.
func (s *session) maxIO() int { return min(s.transport.MaxIOSize(), maxIOSize) &^ 4095 }

// maxIOSize is the kernel client's own bound: 128 pages.
const maxIOSize = 128 * 4096

// makeArena gets the memory of the device's slots. It is taken from the
// system when used, not before.
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
