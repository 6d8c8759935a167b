package rtrs

import (
	"fmt"
	"math/bits"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/internal/tally"
)

// Counters are written by the owner of a connection and read by anybody. A
// reset does not write to the counters: the reader keeps a copy and subtracts
// it from then on (PathDetails.subtractCounts).

// connStats are the counters of one connection, written by its owner. They
// fill cache lines of their own.
type connStats struct {
	_ [64]byte
	// READ and WRITE requests that were begun on this connection, and their
	// bytes: data and user message.
	reads, readBytes   tally.Count
	writes, writeBytes tally.Count
	noData             tally.Count // client: those of both without data
	started, finished  tally.Count // requests of every kind
	arrived            atomic.Bool // something came in since the last look

	looks       [pollBatch + 1]tally.Count // looks at the queue, by completions found
	latency     [2]latencyCounter          // client: of reads, writes
	migratedOff []tally.Count              // client: by CPU, requests that were sent there and answered elsewhere
	migratedTo  []tally.Count              // client: by CPU, answers to requests that were sent elsewhere
	_           [64]byte
}

// noteHeard notes a sign of life.
func (s *connStats) noteHeard() {
	if !s.arrived.Load() {
		s.arrived.Store(true)
	}
}

// takeHeard returns whether there was a sign of life since the last call.
func (s *connStats) takeHeard() bool {
	return s.arrived.Load() && s.arrived.Swap(false)
}

// inFlightCount is the number of requests that are started and not finished.
func (s *connStats) inFlightCount() int64 {
	done := s.finished.Load() // first: a later start only makes the sum larger
	return int64(s.started.Load() - done)
}

// countRequest counts a request of n bytes, data and user message.
func (s *connStats) countRequest(read bool, n int) {
	s.started.Add(1)
	if read {
		s.reads.Add(1)
		s.readBytes.Add(uint64(n))
	} else {
		s.writes.Add(1)
		s.writeBytes.Add(uint64(n))
	}
}

// countMigration counts an answer that came on another CPU than the request left.
func (s *connStats) countMigration(from, to uint32) {
	if int(from) < len(s.migratedOff) && int(to) < len(s.migratedTo) {
		s.migratedOff[from].Add(1)
		s.migratedTo[to].Add(1)
	}
}

// latencyCounter counts requests by the time to their answer.
type latencyCounter struct {
	counts [latencyBuckets]tally.Count
	max    atomic.Int64 // ns
}

// latencyBuckets: below 1, 2, 4, ... 65536 ms, and the rest.
const latencyBuckets = 18

func (l *latencyCounter) addSample(ns int64) {
	i := bits.Len64(uint64(max(ns, 0)) / uint64(time.Millisecond))
	l.counts[min(i, latencyBuckets-1)].Add(1)
	if ns > l.max.Load() {
		l.max.Store(ns)
	}
}

// PathStats are the counts of one path since it was made, or since the last
// reset of their kind.
type PathStats struct {
	ReadCount  uint64        // READs sent (client) or taken (server); an RNBD FLUSH or OPEN is one
	ReadBytes  uint64        // their data, server to client, and user messages
	WriteCount uint64        // WRITEs; an RNBD discard, write zeroes or CLOSE is one
	WriteBytes uint64        // their data, client to server, and user messages
	Inflight   int64         // requests under way; no reset changes it
	Latency    time.Duration // last heartbeat round trip, 0 before the first

	// Client only.
	Failovers        uint64 // requests taken over from other paths
	Reconnects       uint64 // successful reconnects
	ReconnectsFailed uint64
}

// Add adds the counts of t to s, and keeps the larger latency.
func (s *PathStats) Add(t PathStats) {
	s.ReadCount += t.ReadCount
	s.ReadBytes += t.ReadBytes
	s.WriteCount += t.WriteCount
	s.WriteBytes += t.WriteBytes
	s.Inflight += t.Inflight
	s.Latency = max(s.Latency, t.Latency)
	s.Failovers += t.Failovers
	s.Reconnects += t.Reconnects
	s.ReconnectsFailed += t.ReconnectsFailed
}

// addConn adds the counters of one connection.
func (s *PathStats) addConn(c *connStats) {
	s.ReadCount += c.reads.Load()
	s.ReadBytes += c.readBytes.Load()
	s.WriteCount += c.writes.Load()
	s.WriteBytes += c.writeBytes.Load()
	s.Inflight += c.inFlightCount()
}

// PathDetails are PathStats and the distributions that are too large for every
// listing.
type PathDetails struct {
	PathStats

	// Completions of both ends.
	Completions CompletionStats

	// Client only.

	// CPUMigrationFrom and CPUMigrationTo count, by CPU, the requests that were
	// sent on one CPU and answered on another: the owner's thread had moved,
	// for a request never changes its owner. The CPU of a thread is looked up
	// when it wakes and every 1024 polls.
	CPUMigrationFrom, CPUMigrationTo []uint64
	// SGEntries counts requests by the length of their scatter-gather list, by
	// poller in the order of the configuration. Data is one piece of a region,
	// or none.
	SGEntries [][2]uint64
	// ReadLatency and WriteLatency are from sending to the answer.
	ReadLatency, WriteLatency LatencyStats
}

// CompletionStats counts the looks at a completion queue that found something
// of the path, by the number of completions found.
type CompletionStats [pollBatch + 1]uint64

// Max is the largest number of completions found at once.
func (c *CompletionStats) Max() (n int) {
	for i, v := range c {
		if v > 0 {
			n = i
		}
	}
	return n
}

// Calls is the number of looks that found something.
func (c *CompletionStats) Calls() (n uint64) {
	for _, v := range c {
		n += v
	}
	return n
}

// Total is the number of completions.
func (c *CompletionStats) Total() (n uint64) {
	for i, v := range c {
		n += uint64(i) * v
	}
	return n
}

// LatencyStats counts requests by duration.
type LatencyStats struct {
	// Counts[i] is for durations below 2^i ms that no earlier one is for; the
	// last has no limit.
	Counts [latencyBuckets]uint64
	// Max is the longest. After a reset it may be an earlier one's: never
	// more than the limit of the last count that is not 0.
	Max time.Duration
}

func (l *LatencyStats) addCounts(t *LatencyStats) {
	for i := range l.Counts {
		l.Counts[i] += t.Counts[i]
	}
	l.Max = max(l.Max, t.Max)
}

// subtractCounts subtracts the counts in before.
func (l *LatencyStats) subtractCounts(before *LatencyStats) {
	limit := time.Duration(0)
	for i := range l.Counts {
		l.Counts[i] -= before.Counts[i]
		if l.Counts[i] > 0 {
			limit = time.Millisecond << i
		}
	}
	switch {
	case l.Max > before.Max: // reached since
	case l.Counts[latencyBuckets-1] > 0:
	default:
		l.Max = min(l.Max, limit)
	}
}

func (l *LatencyStats) addCounter(c *latencyCounter) {
	for i := range l.Counts {
		l.Counts[i] += c.counts[i].Load()
	}
	l.Max = max(l.Max, time.Duration(c.max.Load()))
}

// addConn adds the counters of one connection. poller is the index of the
// connection's poller, of pollers in all.
func (d *PathDetails) addConn(c *connStats, poller, pollers int) {
	d.PathStats.addConn(c)
	for i := range c.looks {
		d.Completions[i] += c.looks[i].Load()
	}
	if c.migratedOff == nil { // the server's
		return
	}
	d.CPUMigrationFrom = addCounters(d.CPUMigrationFrom, c.migratedOff)
	d.CPUMigrationTo = addCounters(d.CPUMigrationTo, c.migratedTo)
	d.ReadLatency.addCounter(&c.latency[0])
	d.WriteLatency.addCounter(&c.latency[1])
	d.SGEntries = growSlice(d.SGEntries, pollers)
	none, all := c.noData.Load(), c.reads.Load()+c.writes.Load() // a later request has data, for a moment
	d.SGEntries[poller][0] += none
	d.SGEntries[poller][1] += all - none
}

func growSlice[T any](s []T, n int) []T {
	if len(s) < n {
		s = append(s, make([]T, n-len(s))...)
	}
	return s
}

func addCounters(sum []uint64, cs []tally.Count) []uint64 {
	sum = growSlice(sum, len(cs))
	for i := range cs {
		sum[i] += cs[i].Load()
	}
	return sum
}

// addCounts adds the counts of t.
func (d *PathDetails) addCounts(t *PathDetails) {
	d.PathStats.Add(t.PathStats)
	for i, n := range t.Completions {
		d.Completions[i] += n
	}
	d.CPUMigrationFrom = addCounts(d.CPUMigrationFrom, t.CPUMigrationFrom, 1)
	d.CPUMigrationTo = addCounts(d.CPUMigrationTo, t.CPUMigrationTo, 1)
	d.SGEntries = growSlice(d.SGEntries, len(t.SGEntries))
	for i, n := range t.SGEntries {
		for k := range n {
			d.SGEntries[i][k] += n[k]
		}
	}
	d.ReadLatency.addCounts(&t.ReadLatency)
	d.WriteLatency.addCounts(&t.WriteLatency)
}

// addCounts adds counts, times 1 or, in the arithmetic of uint64, -1.
func addCounts(sum, n []uint64, times uint64) []uint64 {
	sum = growSlice(sum, len(n))
	for i := range n {
		sum[i] += times * n[i]
	}
	return sum
}

const minusOne = ^uint64(0)

// subtractCounts subtracts the counts in before. Inflight and the last heartbeat stay.
func (d *PathDetails) subtractCounts(before *PathDetails) {
	d.ReadCount -= before.ReadCount
	d.ReadBytes -= before.ReadBytes
	d.WriteCount -= before.WriteCount
	d.WriteBytes -= before.WriteBytes
	d.Failovers -= before.Failovers
	d.Reconnects -= before.Reconnects
	d.ReconnectsFailed -= before.ReconnectsFailed
	for i, n := range before.Completions {
		d.Completions[i] -= n
	}
	d.CPUMigrationFrom = addCounts(d.CPUMigrationFrom, before.CPUMigrationFrom, minusOne)
	d.CPUMigrationTo = addCounts(d.CPUMigrationTo, before.CPUMigrationTo, minusOne)
	for i, n := range before.SGEntries {
		for k := range n { // the difference of two counters may go back by one
			d.SGEntries[i][k] -= min(n[k], d.SGEntries[i][k])
		}
	}
	d.ReadLatency.subtractCounts(&before.ReadLatency)
	d.WriteLatency.subtractCounts(&before.WriteLatency)
}

// StatKind is a set of counts that are reset together: one for each file of the
// kernel's stats folders, today's and earlier ones.
type StatKind uint8

const (
	StatRDMA         StatKind = 1 << iota // counts, bytes, failovers
	StatReconnects                        // of both results
	StatCPUMigration                      // in both directions
	StatSGEntries
	StatRDMALat
	StatWCCompletion

	StatAll = StatRDMA | StatReconnects | StatCPUMigration | StatSGEntries | StatRDMALat | StatWCCompletion
)

var statKinds = []struct {
	kind StatKind
	name string
}{
	{StatRDMA, "rdma"}, {StatReconnects, "reconnects"}, {StatCPUMigration, "cpu_migration"},
	{StatSGEntries, "sg_entries"}, {StatRDMALat, "rdma_lat"}, {StatWCCompletion, "wc_completion"},
	{StatAll, "all"},
}

// ParseStatKind reads the name of a kind, or "all".
func ParseStatKind(name string) (StatKind, error) {
	var names []string
	for _, k := range statKinds {
		if k.name == name {
			return k.kind, nil
		}
		names = append(names, k.name)
	}
	return 0, fmt.Errorf("statistics %q: use one of %s: %w", name, strings.Join(names, ", "), syscall.EINVAL)
}

// resetKinds sets d, for the given kinds, to the counts in now: later counts are
// relative to d.
func (d *PathDetails) resetKinds(kinds StatKind, now *PathDetails) {
	if kinds&StatRDMA != 0 {
		d.ReadCount, d.ReadBytes = now.ReadCount, now.ReadBytes
		d.WriteCount, d.WriteBytes = now.WriteCount, now.WriteBytes
		d.Failovers = now.Failovers
	}
	if kinds&StatReconnects != 0 {
		d.Reconnects, d.ReconnectsFailed = now.Reconnects, now.ReconnectsFailed
	}
	if kinds&StatCPUMigration != 0 {
		d.CPUMigrationFrom, d.CPUMigrationTo = now.CPUMigrationFrom, now.CPUMigrationTo
	}
	if kinds&StatSGEntries != 0 {
		d.SGEntries = now.SGEntries
	}
	if kinds&StatRDMALat != 0 {
		d.ReadLatency, d.WriteLatency = now.ReadLatency, now.WriteLatency
	}
	if kinds&StatWCCompletion != 0 {
		d.Completions = now.Completions
	}
}
