// Package server exports files and block devices of this host over RTRS.
//
// A Server owns P pumps. RTRS connections belong to a pump for life; each pump
// has one ring to every io plugin process. A request runs from the wire to the
// ring and back on its pump, without a lock (queue.go is the way there, answer.go
// the way back). Everything else - opening, access rules, plugin life - happens on
// ordinary goroutines and reaches a pump through pump.Do.
//
// The server does not touch payload: the chunk that a client wrote to is a
// slice of a memfd arena, and the io plugin has mapped the same arena.
//
// Names sent by clients are resolved inside a jail (jail.go). access.go
// decides about write access. restart.go and reopen.go handle the death of a
// plugin.
package server
