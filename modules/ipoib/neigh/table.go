package neigh

import (
	"net/netip"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

// Frame is a packet to be sent to a neighbour or to a multicast group.
type Frame struct {
	Dst    wire.Address
	Type   uint16 // EtherType
	Packet []byte
}

// Config sizes a table. A zero field means the default named here.
type Config struct {
	Queue      int           // packets that wait for one address; 3
	Entries    int           // 1024
	Probes     int           // requests without an answer before an entry is removed; 3
	Retransmit time.Duration // between requests; 1 s
	Reachable  time.Duration // validity of an answer; 30 s
	Idle       time.Duration // an unused entry is removed after it; 60 s
}

func (c Config) withDefaults() Config {
	def := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	defTime := func(v *time.Duration, d time.Duration) {
		if *v == 0 {
			*v = d
		}
	}
	def(&c.Queue, 3)
	def(&c.Entries, 1024)
	def(&c.Probes, 3)
	defTime(&c.Retransmit, time.Second)
	defTime(&c.Reachable, 30*time.Second)
	defTime(&c.Idle, time.Minute)
	return c
}

// State of an entry.
type State uint8

const (
	Incomplete State = iota // asked, no answer yet
	Reachable               // answered not long ago
	Stale                   // the answer is old, or came unasked
	Probe                   // the old address is used while it is confirmed
)

// String returns the name of the state as ip-neighbour(8) shows it.
func (s State) String() string {
	return [...]string{"INCOMPLETE", "REACHABLE", "STALE", "PROBE"}[s]
}

// Stats are the counters of a table.
type Stats struct {
	Malformed  uint64 // packets that were no valid ARP or neighbour discovery
	Spoofed    uint64 // packets with another link-layer address than that of their sender
	Conflicts  uint64 // packets of others that claim an address of this interface
	Failed     uint64 // entries without an answer
	QueueDrops uint64 // packets dropped because too many waited, or no answer came
	Full       uint64 // entries removed early to make room for others
}

// Entry is one neighbour, as Entries lists it.
type Entry struct {
	IP      netip.Addr
	Address wire.Address // zero while Incomplete
	State   State
	Queued  int
	Used    time.Time
}

type neighbor struct {
	Entry
	queue    []Frame   // frames that wait for the answer; Dst is not set
	asked    int       // requests without an answer
	deadline time.Time // end of the state
}

// Table maps IP addresses to link-layer addresses.
type Table struct {
	cfg     Config
	link    wire.Link
	local   wire.Address
	ips     []netip.Prefix
	entries map[netip.Addr]*neighbor
	stats   Stats
}

// New makes a table for the interface with the address local on link.
func New(cfg Config, link wire.Link, local wire.Address) *Table {
	return &Table{cfg: cfg.withDefaults(), link: link, local: local, entries: map[netip.Addr]*neighbor{}}
}

// SetIPs sets the IP addresses of the interface with their prefixes. The table
// answers requests for them and asks in their name.
func (t *Table) SetIPs(ips []netip.Prefix) { t.ips = slices.Clone(ips) }

// SetFlags sets the flags in the interface's own link-layer address.
func (t *Table) SetFlags(flags byte) { t.local[0] = flags }

// Local returns the link-layer address of the interface.
func (t *Table) Local() wire.Address { return t.local }

// Stats returns the counters.
func (t *Table) Stats() Stats { return t.stats }

// Entries lists the neighbours, in the order of their IP addresses.
func (t *Table) Entries() []Entry {
	out := make([]Entry, 0, len(t.entries))
	for _, e := range t.entries {
		e.Queued = len(e.queue)
		out = append(out, e.Entry)
	}
	slices.SortFunc(out, func(a, b Entry) int { return a.IP.Compare(b.IP) })
	return out
}

// Resolve returns the link-layer address of the neighbour ip. If it is not
// known, ok is false and a copy of packet waits for the answer. Frames that
// have to be sent are appended to out.
func (t *Table) Resolve(now time.Time, ip netip.Addr, etherType uint16, packet []byte, out []Frame) (a wire.Address, ok bool, _ []Frame) {
	a, ok, out = t.Ask(now, ip, out)
	if e := t.entries[ip]; !ok {
		if len(e.queue) >= t.cfg.Queue {
			e.queue = slices.Delete(e.queue, 0, 1) // drop the oldest
			t.stats.QueueDrops++
		}
		e.queue = append(e.queue, Frame{Type: etherType, Packet: slices.Clone(packet)})
	}
	return a, ok, out
}

// Ask is Resolve without a packet.
func (t *Table) Ask(now time.Time, ip netip.Addr, out []Frame) (a wire.Address, ok bool, _ []Frame) {
	e := t.entries[ip]
	if e == nil {
		e = t.addEntry(now, ip)
		e.deadline = now.Add(t.cfg.Retransmit)
		out = t.appendRequest(e, out)
	}
	e.Used = now
	if e.State == Incomplete {
		return wire.Address{}, false, out
	}
	if e.State == Reachable && !now.Before(e.deadline) {
		e.State = Stale
	}
	if e.State == Stale {
		e.State, e.asked, e.deadline = Probe, 0, now.Add(t.cfg.Retransmit)
		out = t.appendRequest(e, out)
	}
	return e.Address, true, out
}

// addEntry makes an entry. A full table loses its least recently used entry.
func (t *Table) addEntry(now time.Time, ip netip.Addr) *neighbor {
	if len(t.entries) >= t.cfg.Entries {
		t.evictOldest()
	}
	e := &neighbor{Entry: Entry{IP: ip, Used: now}}
	t.entries[ip] = e
	return e
}

// evictOldest removes the least recently used entry.
func (t *Table) evictOldest() {
	var oldest *neighbor
	for _, e := range t.entries {
		if oldest == nil || e.Used.Before(oldest.Used) {
			oldest = e
		}
	}
	t.stats.Full++
	t.removeEntry(oldest)
}

func (t *Table) removeEntry(e *neighbor) {
	t.stats.QueueDrops += uint64(len(e.queue))
	delete(t.entries, e.IP)
}

// Flush removes all entries. It is for a link that has changed.
func (t *Table) Flush() {
	for _, e := range t.entries {
		t.removeEntry(e)
	}
}

// Tick repeats requests, removes entries that have had no answer, and removes
// unused ones.
func (t *Table) Tick(now time.Time, out []Frame) []Frame {
	for _, e := range t.entries {
		if now.Sub(e.Used) >= t.cfg.Idle && e.State != Incomplete {
			t.removeEntry(e)
			continue
		}
		if e.State != Incomplete && e.State != Probe || now.Before(e.deadline) {
			continue
		}
		if e.asked >= t.cfg.Probes {
			t.stats.Failed++
			t.removeEntry(e)
			continue
		}
		e.deadline = now.Add(t.cfg.Retransmit)
		out = t.appendRequest(e, out)
	}
	return out
}

// Next returns the time at which Tick has something to do, or zero if there is
// none.
func (t *Table) Next() (next time.Time) {
	for _, e := range t.entries {
		at := e.Used.Add(t.cfg.Idle)
		if e.State == Incomplete || e.State == Probe && e.deadline.Before(at) {
			at = e.deadline
		}
		if next.IsZero() || at.Before(next) {
			next = at
		}
	}
	return next
}

// sourceFor returns the address of the interface to ask for ip with.
func (t *Table) sourceFor(ip netip.Addr) (src netip.Addr, ok bool) {
	for _, p := range t.ips {
		a := p.Addr()
		if a.Is4() != ip.Is4() {
			continue
		}
		if p.Contains(ip) {
			return a, true
		}
		if !src.IsValid() || a.IsLinkLocalUnicast() { // a link-local address reaches all of the link
			src = a
		}
	}
	return src, src.IsValid()
}

func (t *Table) ownsAddress(ip netip.Addr) bool {
	return slices.ContainsFunc(t.ips, func(p netip.Prefix) bool { return p.Addr() == ip })
}

// learnAddress stores the link-layer address a of a neighbour and appends the
// packets that waited for it to out. confirmed reports that the address came
// as an answer.
func (t *Table) learnAddress(now time.Time, e *neighbor, a wire.Address, confirmed bool, out []Frame) []Frame {
	changed := e.Address != a
	e.Address = a
	switch {
	case confirmed:
		e.State, e.asked, e.deadline = Reachable, 0, now.Add(t.cfg.Reachable)
	case e.State == Incomplete || changed:
		e.State, e.asked = Stale, 0
	}
	for _, f := range e.queue {
		f.Dst = a
		out = append(out, f)
	}
	e.queue = nil
	return out
}
