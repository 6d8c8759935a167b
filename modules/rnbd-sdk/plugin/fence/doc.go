// Package fence keeps two generations of a storage plugin from writing to one
// backing store at the same time.
//
// The end of a process is no fence: writes that the kernel has accepted continue
// after the process is reaped. But the open file description that they go
// through exists until the last of them has ended, and so do its locks. So a
// plugin locks the description of all its I/O before the first I/O:
//
//	f, err := r.Reopen(os.O_RDWR | syscall.O_DIRECT)
//	...
//	if err := fence.Lock(ctx, f, 0); err != nil { ... }
//
// When Lock returns nil, nothing of an earlier holder of the same byte can
// reach the store any more.
//
// Rules for the caller:
//
//   - All I/O goes through f, a duplicate of it, or a registered file made
//     from it; never through a second open of the same file.
//   - No other process gets a copy of f, and no child is forked without exec.
//   - The lock is never unlocked explicitly: it is released when f is closed and
//     its I/O has ended.
//   - Two descriptions of one file in one plugin (direct and buffered, say)
//     take one slot each. Every generation uses the same slots, of the same
//     device node.
//   - Buffered writes of the dead process are written back later: call fsync
//     after the grant, before any new write.
//   - If Lock fails because ctx ended, old I/O may still take effect. Give up.
//
// A host that sends requests of a dead process again takes the slot Owner for
// itself, on a description without I/O, before its plugin opens the store, and
// keeps it until it closes the store. Without it, another host that waits for
// the plugin's slots could get them between two processes, and the repeated
// requests would overwrite its writes.
//
// The locks do not interact with flock(2), so udev's probing is not in the
// way.
package fence
