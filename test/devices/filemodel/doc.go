// Package filemodel does random things to files and compares the files with a
// model: writes and reads by system call and by mapping, truncation both
// ways, holes, fsync, and reopening with nothing left in the page cache.
//
//	t, err := filemodel.New(filemodel.Config{Dir: dir, Seed: seed})
//	err = t.Run(func() bool { return t.Steps() == 10000 })
//	err = t.Close() // unmount, mount
//	err = t.Check()
//
// The steps depend on the seed alone, so a failure can be had again. Every
// eight bytes that are written tell the step that wrote them and their place:
// stale data says where it is from. A Tester is for one goroutine.
package filemodel
