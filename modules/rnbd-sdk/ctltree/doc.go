// Package ctltree serves a tree of control files over FUSE. The files behave
// like the kernel's own: the contents are made when a file is read, each
// write(2) is one command, the answer to a command is its errno, and
// directories show the present state.
//
// A node is a *File, a Link, or a Dir: Fixed for a set of nodes, Listing for
// one that is computed. Nothing is cached, neither by the kernel nor here.
//
// Mount serves nodes at several places below one folder, each place as a mount
// of its own, so that several daemons can show their parts of one tree side by
// side. Functions of nodes are called from any goroutine, many at a time. One
// that blocks holds up its caller alone; a writer that is interrupted gets
// EINTR at once and its command's context ends.
//
// A process must not touch the files that it serves itself: the thread would
// wait for its own answer.
package ctltree
