package main

import (
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// A seat is chosen for a client that waits for its reply, if it has the only
// connection.
func TestSeatIsForOneConnection(t *testing.T) {
	for conns, want := range map[int]bool{1: true, 2: false} {
		r := newRig(t, rigConfig{})
		moves := 0
		r.onQueue(0, func(q *queue) {
			var now int64
			q.now = func() int64 { now += 30_000; return now }
			q.served = func(uint32, blk.Op, int64) {}
			q.seat.Choose([]int{0, 1}, func() int { return 0 }, func(int) { moves++ })
		})
		var clients []*client
		for range conns {
			clients = append(clients, r.connect(false))
		}
		for i := range 128 {
			clients[i%conns].read(0, make([]byte, 4096))
		}
		r.onQueue(0, func(*queue) {
			if (moves > 0) != want {
				t.Errorf("%d connections: %d changes of the CPU", conns, moves)
			}
		})
	}
}
