// Package frame has the link-layer forms of the few messages that a bond makes
// and reads itself: ARP, unsolicited neighbour advertisements, and reports of
// multicast groups by IGMP and MLD.
//
// A frame of Ethernet (type 1) is the frame without its check sequence. A frame
// of InfiniBand (type 32) is the 4-octet encapsulation header of RFC 4391 and
// the packet behind it; the device finds the destination in the packet. All
// functions are pure.
package frame
