// Package softverbs is the common part of RDMA fabrics in software. A
// provider embeds its types and adds a wire format, sockets and a way to
// connect:
//
//	KeyTable, Domain, Region   memory and its keys for peers
//	QP, SendQueue, RecvQueue   a queue pair: its phases, its requests, its end
//	CQ, Ready                  a completion queue: connections with work, deadlines, sleep
//	Pending                    work that other goroutines have for its owner
//	HandshakeLimiter           bounds the handshakes that are not finished
//	Totals                     the counters of a device
//
// The provider's own types call these methods directly: nothing on the data
// path goes through an interface. CQ calls a provider's queue pair through Conn
// for deadlines only.
//
// # Threads
//
// The owner of a completion queue is the goroutine that calls its Poll, Flush
// and Arm, and posts to its queue pairs. Methods are for the owner unless a
// comment names any goroutine. Key lookup and key rotation are atomic
// operations; registration takes a lock.
//
// # Closing a region
//
// After Region.Close has returned the provider does not touch the memory. Close
// takes the region out of the table, so that no key finds it, and calls Release
// of every completion queue with connections of its domain. These touch
// registered memory only while they hold CQ.Turn, and look the key up in the
// same turn. So Release takes that lock once and handles every region looked up
// before: work in progress ends, or goes on from a copy.
package softverbs
