// Package syscalls counts the system calls of running processes, by name.
//
//	c, err := syscalls.Watch(pid)   // ErrUnavailable without root or the kernel's help
//	before, err := c.Read()
//	...                             // the process works
//	after, err := c.Read()
//	c.Close()
//
// The kernel counts at its tracepoints (perf_event_open(2)). That costs a
// call some hundred nanoseconds: batches stay as they are, unlike under
// strace. A process is watched with all threads that it has and will have.
package syscalls
