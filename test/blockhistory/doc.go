// Package blockhistory judges what a disk answered to concurrent reads and
// writes: each block must have behaved like one register that every request
// reads or writes at one moment between its begin and its end.
//
//	h := blockhistory.New(512, seed)
//	w := h.BeginWrite(block, buf)        // fills buf, n blocks long
//	... write it ...
//	w.Done()                             // only if it was acknowledged
//	r := h.BeginRead(block, n)
//	... read ...
//	err := r.Done(buf)                   // garbage and torn blocks
//	err := h.Judge()                     // at the end
//
// A write that failed, or whose answer was lost, may take effect at any later
// moment, once or never.
package blockhistory
