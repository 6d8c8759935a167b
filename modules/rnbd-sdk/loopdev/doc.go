// Package loopdev makes loop devices of files that the caller's own processes serve by
// FUSE.
//
// A process that serves a file must not wait in the kernel for the file: a thread that
// waits there cannot be killed, and a process with such a thread keeps its descriptors,
// so nothing would end the wait. For that reason a Tool does the work: the caller's own
// program, started with a hidden argument, which calls Main. The caller waits for the
// tool no longer than it wants to.
package loopdev
