// Package rtrswire gives names to the bytes of the RTRS protocol, version 2.0,
// as the Linux kernel speaks it (docs/extend/protocol/rtrs.md).
//
// A message is a byte slice with accessors (ConnReq, ConnRsp, InfoReq, InfoRsp,
// RkeyRsp); the header that ends every request is decoded at once by
// ParseRequest, since it lies in memory that the peer may still write. Integers
// in messages are little-endian. An Imm is the 32-bit immediate value in host
// order; the fabric carries it big-endian.
//
// Accessors do not check lengths: call Check (or ParseRequest) first, once.
// Nothing here allocates, except errors, and nothing keeps a slice it is given.
package rtrswire
