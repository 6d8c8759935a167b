// Package medium is a disk whose medium a test controls: a file on a FUSE mount that
// this process serves. It keeps apart what was written and what was synced, so that a
// power cut can be played; and its requests can be delayed, held, cut short and failed.
//
//	m, err := medium.Mount(dir, 16<<20)
//	defer m.Close()
//	m.HoldWrites()
//	... a process writes to m.Path() and is killed ...
//	m.Release()
//	m.CutPower() // the file has what was synced
//
// The process that serves the mount must not do I/O on it.
//
// It needs /dev/fuse and the right to mount.
package medium
