// Package mappings keeps the mappings that a client daemon's configuration asks
// for: each is tried in a goroutine of its own until it succeeds, with growing
// pauses, so that a server that is away delays only its own mappings.
package mappings
