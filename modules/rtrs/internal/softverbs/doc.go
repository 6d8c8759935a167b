// Package softverbs holds what RDMA fabrics in software have in common. A
// provider embeds its types and adds a wire format, sockets and a way to
// connect:
//
//	KeyTable, Domain, Region    memory and the keys under which peers reach it
//
// # Threads
//
// The owner of a completion queue is the goroutine that calls its Poll, Flush
// and Arm. A method is for the owner only unless its comment names any
// goroutine. Key lookup and key rotation are atomic operations; registration
// takes a lock.
package softverbs
