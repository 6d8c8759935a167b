// Package control carries the control API of the daemons: gRPC over a unix
// socket that only its owner may open.
//
// A daemon implements the generated server interface of controlpb and hands it
// to Serve; a command calls Dial. Errors keep their errno on the way: an error
// of the daemon with a syscall.Errno in its chain arrives as an *Error with
// the same errno, so blk.ToErrno works on both sides.
package control
