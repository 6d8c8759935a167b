// Package mcast keeps the multicast groups of an IPoIB interface: their
// memberships, full or send-only, the packets that wait for a join, and the
// time of the next try of a join that failed.
//
// A Table does no I/O and reads no clock. Its user executes the result of
// Requests and reports the outcome by Joined and Failed. It is not safe for
// concurrent use.
//
// The broadcast group comes first: nothing else is joined before it, and the
// interface has no carrier without it. A packet for a group that is not joined
// waits in the table while the group is joined send-only.
package mcast
