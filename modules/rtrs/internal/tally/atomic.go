//go:build !amd64 || race

package tally

import "sync/atomic"

// Count counts up. The zero value is 0.
type Count struct{ v atomic.Uint64 }

// Add adds n. One goroutine at a time.
func (c *Count) Add(n uint64) { c.v.Store(c.v.Load() + n) }

// Load returns the count. Any goroutine; it may be a little late, and orders
// nothing else.
func (c *Count) Load() uint64 { return c.v.Load() }
