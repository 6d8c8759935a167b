// Package loopback is a fabric within one process. It is made for tests:
// deterministic, without sockets, and with faults that a test injects at any
// time.
//
//	net := loopback.New()
//	client, server := net.Device("client"), net.Device("server")
//	net.Tap(func(e loopback.Event) { ... every message, as it leaves ... })
//	net.Stall(a, b) // nothing arrives between the addresses a and b any more
//	net.Crash(server, false) // the server is gone, and its peers get no event
//
// # Addresses
//
// Addresses are keys of a table and need no interface: a test simulates two
// hosts with two links by using four addresses. A listener on an unspecified
// address takes every address of its port. Ports of dialling ends are given
// out in order, so they name a connection.
//
// # How a message travels
//
// The sender's Poll, Flush or Arm copies a posted request onto the link. The
// receiver's Poll takes it from there: it checks keys, places bytes, consumes
// a receive. Only then is the request complete at the sender, in order, as on
// InfiniBand. Because the link holds a copy, messages of a sender that has
// gone can still arrive, as bytes in a socket buffer do.
//
// # Strictness
//
// The fabric behaves like hardware where software tends to be forgiving, so
// that its users work on both: room in the send queue comes back only when a
// signalled completion at or after the request was polled; an invalidated key
// cannot be invalidated again; closing a protection domain that is in use
// fails. Using one completion queue from two goroutines at a time panics.
//
// # Threads
//
// One mutex guards a network. Faults may be called by any goroutine, also
// from within a Tap function.
package loopback
