// Package dev is an IPoIB interface in datagram mode (RFC 4391): a UD queue pair
// of a fabric below, a TUN device of the kernel above.
//
//	kernel -- TUN --> send.go: next hop, neighbour or group --> queue pair -- fabric
//	kernel <- TUN --- receive.go: ARP and ND are answered <---- queue pair -- fabric
//
// The kernel does no neighbour discovery on a TUN device. Package neigh does it
// here, for the IP addresses that the interface has in the kernel. Packets to
// routes by a gateway are sent to the gateway that the kernel's routing table
// names.
//
// # Peers
//
// There is no subnet manager. Config.Peers are the ports of the link, and every
// multicast datagram is sent as a copy to each of them. Their IP stacks drop what
// they have not joined.
//
// # Goroutines
//
// An interface has four: for packets of the kernel, for datagrams of the fabric,
// for timers, and for changes of addresses. One lock guards the tables of
// neighbours and groups. All goroutines end in Close.
//
// # Hazards
//
// IPoIB has no authentication: who reaches UDP port 4791 of the port's address,
// and knows P_Key and Q_Key, which are on the wire, is a member of the link. A
// neighbour is believed what it says about its own IP addresses.
package dev
