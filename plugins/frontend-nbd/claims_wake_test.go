package main

import (
	"bytes"
	"sync"
	"testing"
)

// A plain write that meets a claim withdraws; the claim may have been waiting
// for just that write, on another queue that sleeps by now.
func TestClaimThatWaitsForAWithdrawnWriteIsWoken(t *testing.T) {
	r := newRig(t, rigConfig{queues: 2, seed: 5, slots: 64, slotSize: 4096})
	var wg sync.WaitGroup
	for w := range 4 {
		c := r.connect(false)
		wg.Go(func() {
			full, part := bytes.Repeat([]byte{byte(w)}, 1024), bytes.Repeat([]byte{0xee}, 24)
			for i := range 1500 {
				call := c.start(cmdWrite, 0, 0, len(full), full)
				if (i+w)%2 == 0 {
					call = c.start(cmdWrite, 0, 500, len(part), part)
				}
				if code, err := call.wait(); code != 0 || err != nil {
					t.Error(code, err)
					return
				}
			}
		})
	}
	wg.Wait()
}
