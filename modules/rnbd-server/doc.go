// Package server exports files and block devices of this host over RTRS.
//
// A Server owns P pumps. RTRS connections belong to a pump for life; each pump
// has one ring to every io plugin process. A request runs from the wire to the
// ring and back on its pump, without a lock (queue.go is that path, read top to
// bottom). Everything else - opening, access rules, plugin life - happens on
// ordinary goroutines and reaches a pump through pump.Do.
//
// Payload is never touched here: the chunk a client wrote to is a slice of a
// memfd arena that the io plugin has mapped too.
//
// The names that clients send are resolved inside a jail (jail.go); which
// client may write is decided in access.go; how a plugin's death is survived is
// in restart.go.
package server
