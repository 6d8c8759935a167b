package rtrs

import (
	"sync/atomic"
	"time"
)

// counter counts up. It has one writer, so add needs no locked instruction;
// anybody may read it.
type counter struct{ v atomic.Uint64 }

func (c *counter) add(n uint64)  { c.v.Store(c.v.Load() + n) }
func (c *counter) value() uint64 { return c.v.Load() }

// connStats are the counters of one connection, written by its owner. They
// fill cache lines of their own.
type connStats struct {
	_                  [64]byte
	reads, readBytes   counter     // finished READ requests and their reply bytes
	writes, writeBytes counter     // finished WRITE requests and their data bytes
	started, finished  counter     // requests
	arrived            atomic.Bool // something came in since the last look
	_                  [64]byte
}

// heard notes a sign of life.
func (s *connStats) heard() {
	if !s.arrived.Load() {
		s.arrived.Store(true)
	}
}

// takeHeard returns whether there was a sign of life since the last call.
func (s *connStats) takeHeard() bool {
	return s.arrived.Load() && s.arrived.Swap(false)
}

// inflight is the number of requests that are started and not finished.
func (s *connStats) inflight() int64 {
	done := s.finished.value() // first: a later start only makes the sum larger
	return int64(s.started.value() - done)
}

// PathStats is a snapshot of the counters of one path since it was made.
type PathStats struct {
	ReadCount  uint64        // finished READs
	ReadBytes  uint64        // data bytes, server to client
	WriteCount uint64        // finished WRITEs
	WriteBytes uint64        // data bytes, client to server
	Inflight   int64         // requests under way
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
	s.ReadCount += c.reads.value()
	s.ReadBytes += c.readBytes.value()
	s.WriteCount += c.writes.value()
	s.WriteBytes += c.writeBytes.value()
	s.Inflight += c.inflight()
}
