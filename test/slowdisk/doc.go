// Package slowdisk is a disk with a medium that a test controls: a file on a
// FUSE mount with writes that can be delayed, held back or failed, and a loop
// device on top of it. Tests of crash fences and of kills with I/O in flight
// use it, because no real disk is slow on demand.
//
//	d := slowdisk.New(t, 64<<20)
//	d.HoldWrites()
//	... a process writes to d.Path() or d.Loop() and is killed ...
//	d.WaitHeld(1)          // its writes sit at the medium
//	d.Release()            // now they are applied
//	for _, w := range d.History() { ... w.Applied ... }
//
// The file lives in the memory of the test process, and that also serves the
// mount: the test must not do I/O on it while it holds that I/O back, except
// from another goroutine or process. Writes that overlap are applied in the
// order of their release.
//
// It needs root, /dev/fuse and (for Loop) /dev/loop-control; a test without
// them is skipped with a line that names the missing one.
package slowdisk
