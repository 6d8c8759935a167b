// Command frontend-nbd is the front-end plugin that serves a client's devices
// as NBD exports. The daemon starts it; README.md is for its users,
// docs/protocol/nbd.md says what of the protocol is served.
//
// # Shape
//
// The daemon owns the listening sockets and passes them by descriptor. A
// goroutine per listener accepts (accept.go), one per new connection
// negotiates (handshake.go), bounded in time and number. Then the connection
// is given to one queue for life and no goroutine is its own any more:
//
//	client ── socket ──► conn ──► op (slot) ──► ring ──► daemon
//	       ◄── writev ── reply ◄──────────────── ring ◄──
//
// disk.go has the kernel's NBD client attached: it gets one end of a socket
// pair, the other one is a connection as above, without a negotiation.
//
// transmission.go and reply.go are the data path, in the order of a request.
//
// # Threads and ownership
//
// A queue, its connections and its share of every device's slots belong to the
// thread that serves the queue. Shared between queues are only the limits of a
// device (replaced as a whole), its openers (counted per connection) and the
// claims on blocks (atomics, claims.go). Payload of a write is in a slot from
// its first byte until the device has answered, payload of a read from the
// request until the socket has taken it.
//
// # Hazards
//
// The socket of a connection is closed only by its queue. A slot that the
// device works on is never given away, whatever happens to its connection:
// removal of a device waits for it.
package main
