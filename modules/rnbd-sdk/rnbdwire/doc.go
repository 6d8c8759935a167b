// Package rnbdwire is the format of RNBD messages: the user messages of RTRS
// requests, and the data of two answers. All integers are little-endian.
//
// A message is a byte slice with named accessors; IsValid must be asked before
// them. For each there is a Fields struct that is put into a slice at once. The
// tables are in docs/extend/protocol/rnbd.md.
package rnbdwire
