// Package nbdwire is the format of NBD: fixed newstyle negotiation, simple and
// structured replies, for clients and servers. All integers are big-endian.
//
// A header is a byte slice with named accessors; the slice has at least the header's
// size. Put functions write one into a slice of that size. Negotiate is the whole
// negotiation of a client, and List asks for the names of a server's exports.
//
// The format is that of the NBD project's doc/proto.md; docs/protocol/nbd.md lists the
// parts that this project supports. Numbers of errors on the wire are those of Linux.
package nbdwire
