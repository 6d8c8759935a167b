// Package shm is the memory that a host and a plugin share: arenas of payload,
// rings of requests and completions, and the doorbells between them.
//
// The host creates everything; the peer opens it by descriptor:
//
//	arena, _ := shm.NewArena("srv0", 64<<20)            // host
//	ring, _ := shm.NewRing(shm.DefaultEntries)          // host
//	...                                                 // descriptors travel by SCM_RIGHTS
//	s := ring.Submitter()                               // one owner
//	s.Push(&shm.SQE{Tag: 7, Op: blk.Read, Len: 4096})
//	s.Publish()                                         // visible; kicks only a sleeping peer
//
// # Threads
//
// A Submitter has one owner and a Completer has one owner; they may be in
// different processes. Nothing here locks, allocates or blocks per entry. The
// owner sleeps on FD after Arm returned true, and calls Disarm when it wakes.
//
// # Trust
//
// Shared memory is an untrusted wire. Entries are copied out once; indices of
// the peer are checked against our own, and a peer that breaks the ring makes
// Err return ErrCorrupt and everything else do nothing. The fields of an
// entry (device, arena, offset, length, tag) are for its reader to check.
// Memory files are sealed against shrinking, so that no peer can make us
// fault.
//
// # Hazards
//
// After Close of an Arena or a Ring its memory is unmapped: a slice or an end
// that is used later faults. A peer may clear O_NONBLOCK on an eventfd and
// fill it, and so stall the thread that kicks it: a plugin is trusted that far.
//
// The layout is docs/extend/abi/ring-v1.md.
package shm
