// Package neigh resolves IP addresses of an IPoIB link to link-layer addresses,
// by ARP and IPv6 neighbour discovery.
//
// A Table does no I/O and reads no clock. Its methods take packets and the
// time, and return the frames to be sent. It is not safe for concurrent use.
//
// Entries go through the states of RFC 4861, section 7.3.2, for both families:
//
//	            answer                 Config.Reachable             used
//	Incomplete --------> Reachable -----------------------> Stale -------> Probe
//	    | no answer          ^                                ^  |           | |
//	    v                    |             answer             |  | unused    | | no answer
//	 removed                 '--------------------------------+--+-----------' |
//	    ^                         address changed, unasked ---'  v             |
//	    '--------------------------------------------------------'-------------'
//
// Memory is bounded: Config.Entries entries, and Config.Queue packets for each
// entry without an answer.
package neigh
