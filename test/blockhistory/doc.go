// Package blockhistory judges a disk's answers to concurrent reads and writes:
// each block must have behaved like one register that every read reads at one
// moment between its begin and its end, and every write writes at one or more
// moments between its begin and its end. More than one, since a write is
// repeated if its answer is lost with its path; so the order of writes under
// way at the same time may seem to change, but acknowledged data stays.
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
// A write that failed, or that lost its answer, may take effect at any later
// moment, or never.
package blockhistory
