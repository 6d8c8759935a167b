// Command frontend-nbd is the front-end plugin that serves a client's devices
// as NBD exports. The daemon starts it. README.md is for its users;
// docs/extend/protocol/nbd.md lists the parts of the protocol that it serves.
//
// # Shape
//
// The daemon owns the listening sockets and passes their descriptors. One
// goroutine per listener accepts (accept.go), one per new connection negotiates
// (handshake.go), bounded in time and number (handshake_limiter.go). Then the connection belongs to
// one queue for life and has no goroutine any more:
//
//	client ── socket ──► conn ──► op (slot) ──► ring ──► daemon
//	       ◄── writev ── reply ◄──────────────── ring ◄──
//
// A connection with TLS (tls.go) keeps two goroutines, which carry its bytes to
// such a socket and back (tunnel.go).
//
// disk.go attaches the kernel's NBD client: the kernel gets one end of a socket
// pair, and the other end is a connection as above, without a negotiation.
//
// transmission.go and reply.go are the data path, in the order of a request;
// status.go is the part of block status; context.go negotiates it.
//
// recheck.go checks the access of open connections again when rules, CAs or revoked certificates have
// changed.
//
// transfer.go gives connections up for another process and takes them over;
// handed.go is what one process leaves to the next.
//
// # Threads and ownership
//
// A queue, its connections and its share of every device's slots belong to the
// thread that serves the queue. Queues share only the limits of a device
// (replaced as a whole), its openers (counted per connection) and the claims on
// blocks (atomics, claims.go). The payload of a write is in a slot from its
// first byte until the device has answered, the payload of a read from the
// request until the socket has taken it.
//
// # Hazards
//
// Only its queue closes the socket of a connection. A slot that the device
// works on is never given to another request, whatever happens to its
// connection; the removal of a device waits for it.
package main
