// Package pump runs one data-path loop on one locked thread: it polls its
// sources (rings, completion queues, disks), spins a little when there is
// nothing, then sleeps on all their descriptors in one blocking call.
//
//	p, err := pump.New(pump.Config{Name: "srv0"})
//	p.Add(source)
//	p.Start()
//	...
//	p.Stop()
//
// # Threads
//
// A source is called by one thread at a time, the pump's owner: the pump's own
// thread, or a Caller that drives the pump. Control work reaches the owner by
// Do and Call. Add, Remove, Do, Call, NewCaller, Recall, Stop and Stats may be
// called from any goroutine. callers.go draws the modes of a pump. A build with
// the tag pumpdebug checks these rules.
//
// # Wake-ups
//
// Before sleeping the pump arms every source and looks at each once more: Arm
// returns false when work came meanwhile. Descriptors are watched for edges,
// so a source need not drain its descriptor, but it must return false from Arm
// as long as it has something left to do. A descriptor may be an epoll set, but
// not of more than one further level of them: the kernel limits nesting. An idle
// pump does not wake at all. One that is woken now and then sleeps in Go's network
// poller, where it disturbs no other thread (see park_unsafe.go).
//
// # Spinning
//
// After the last event the pump keeps looking for Config.Spin, giving way to
// other threads by sched_yield between looks, so spinners need not know of one
// another. The budget covers the slow round trip through several sleeping
// processes, not one wake-up: a shorter one makes everybody spin and then sleep
// all the same. It does not spin after large I/O (the transfer dwarfs the
// wake-up) nor while fewer than a quarter of the last 16 spins paid off; then
// one idle moment in 16 is a probe. After a sleep of 200 ms and more it spins
// until that was in vain once: rare events come in groups.
//
// # The CPU
//
// The scheduler chooses it. A pump that answers a client outside the process, one
// request at a time, may have a Seat: that takes it to the client's CPU.
//
// # Hazards
//
// A function given to Do or Call, and every method of a source, must not
// block: everything on the pump waits for it. Call from a source's method runs
// the function at once. A process with N pumps needs GOMAXPROCS above N (see
// SetProcs), or its other goroutines starve. A source that is bound to a thread
// (an io_uring with a single issuer) excludes callers.
package pump
