package main

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
)

// Exclusive writes of many threads: none while another has one of its blocks,
// and each gets its turn.
func TestClaims_Exclusive(t *testing.T) {
	const threads, blocks, block = 4, 8, 512
	c := rangeClaims{writes: make([]byteRange, threads)}
	c.exclusive.Store(true)
	var owner [blocks]atomic.Int32
	var all sync.WaitGroup
	for slot := range uint32(threads) {
		all.Add(1)
		go func() {
			defer all.Done()
			rnd := rand.New(rand.NewPCG(1, uint64(slot)))
			for range 2000 {
				first := rnd.IntN(blocks)
				n := 1 + rnd.IntN(blocks-first)
				for !c.beginWrite(slot, uint64(first*block), uint64((first+n)*block), block) {
					runtime.Gosched()
				}
				for b := first; b < first+n; b++ {
					if !owner[b].CompareAndSwap(0, int32(slot)+1) {
						t.Errorf("block %d is with %d and %d", b, owner[b].Load()-1, slot)
					}
				}
				runtime.Gosched()
				for b := first; b < first+n; b++ {
					owner[b].Store(0)
				}
				c.endWrite(slot)
			}
		}()
	}
	all.Wait()
}
