// Package dev implements an IPoIB interface (RFC 4391). Below it is a UD queue
// pair of a fabric and, in connected mode (RFC 4755), reliable connections.
// Above it is a TUN device of the kernel.
//
//	kernel -- TUN --> send.go: next hop, neighbour or group --> queue pair -- fabric
//	                      `- connected mode: package cm -> connection --'
//	kernel <- TUN --- receive.go: ARP and ND are answered <---- queue pair -- fabric
//
// The kernel does no neighbour discovery on a TUN device. Package neigh does it
// here, for the IP addresses that the interface has in the kernel. Packets for
// other networks are sent to the gateway in the kernel's routing table.
//
// # Peers
//
// There is no subnet manager. Config.Peers are the ports of the link, and every
// multicast datagram is sent as a copy to each of them. A receiver's IP stack
// drops datagrams of groups that it has not joined. With Config.Registry copies go
// to the members of the group only.
//
// # Goroutines
//
// An interface has five goroutines: for packets of the kernel, for datagrams of
// the fabric, for timers, for changes of addresses, and for the registry. In connected mode those
// of package cm are added. One lock guards the tables of neighbours and groups.
// All goroutines end in Close.
//
// # Hazards
//
// IPoIB has no authentication. Any sender that reaches UDP port 4791 of the
// port's address, with the P_Key and the Q_Key of the link, is a member of the
// link. Both keys are readable on the wire. The statement of a neighbour about
// its own IP addresses is believed.
package dev
