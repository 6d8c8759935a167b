// Package wire holds the formats of IP over InfiniBand (RFC 4391, RFC 4755) as
// byte slices with named accessors: the encapsulation header, 20-octet
// link-layer addresses, multicast GIDs, ARP, neighbour discovery, and the private
// data and service IDs of connected mode.
//
// It does no I/O and keeps no state. Parsers take untrusted bytes: a view is
// safe to read after its Valid method has returned true. All fields are big
// endian. The formats are described in docs/extend/protocol/ipoib.md.
package wire
