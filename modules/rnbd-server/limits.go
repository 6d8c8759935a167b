package server

import (
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// admitOpen counts an OPEN. The error is EBUSY if there are too many. doneOpen
// ends it.
func (s *Server) admitOpen() error {
	if n := s.opens.Add(1); s.cfg.Opens > 0 && n > int64(s.cfg.Opens) {
		s.opens.Add(-1)
		s.refused.opens.Add(1)
		return fmt.Errorf("%d OPENs are under way: %w", s.cfg.Opens, syscall.EBUSY)
	}
	return nil
}

func (s *Server) doneOpen() { s.opens.Add(-1) }

// roomFor returns EMFILE if a session with n devices may have no more.
func (s *Server) roomFor(n int) error {
	if s.cfg.SessionDevices > 0 && n >= s.cfg.SessionDevices {
		s.refused.devices.Add(1)
		return fmt.Errorf("the session has %d devices open, and gets no more: %w", n, syscall.EMFILE)
	}
	return nil
}

// limitCounters returns the refusals as counters of a fabric named server.
func (s *Server) limitCounters() (out []*controlpb.FabricCounter) {
	add := func(name, reason string, n uint64) {
		out = append(out, &controlpb.FabricCounter{Fabric: "server", Name: name, Reason: reason, Value: n})
	}
	var u rtrs.Usage
	if f := s.front.Load(); f != nil {
		u = f.rtrs.Usage()
	}
	add("refused", "sessions", u.RefusedSessions)
	add("refused", "connections", u.RefusedConnections)
	add("refused", "chunk-memory", u.RefusedChunkMemory)
	add("refused", "devices", s.refused.devices.Load())
	add("refused", "opens", s.refused.opens.Load())
	add("ignored", "unknown-flags", s.unknownFlags.Load())
	add("unfinished", "gave-way", u.GaveWay)
	add("unfinished", "timed-out", u.TimedOut)
	return out
}
