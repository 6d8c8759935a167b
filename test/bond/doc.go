// Package bond tests bonding on interfaces of Linux, in network namespaces that
// the tests make. It needs root.
//
//	up            low             sw                peer
//	bond0 (TAP)   s0, s1 (veth)   p0, p1, pp: br0   e0
//	10.5.0.1                                        10.5.0.2
//
// The bond takes s0 and s1 by packet sockets; the bridge in sw is the switch.
// It keeps the groups of each port from the membership reports that arrive
// there. A cut is either of the carrier (the port goes down) or silent (the
// port leaves the bridge).
package bond
