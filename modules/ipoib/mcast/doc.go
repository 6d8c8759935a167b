// Package mcast keeps the multicast groups of an IPoIB interface: which are
// joined, which are joined only to be sent to, what waits for a join, and when a
// join that failed is tried again.
//
// A Table does no I/O and reads no clock. Its user asks for Requests, does them,
// and tells the result with Joined and Failed. It is not safe for concurrent use.
//
// The broadcast group comes first: nothing else is joined before it, and the
// interface has no carrier without it. A packet for a group that is not joined
// waits in the table while the group is joined send-only.
package mcast
