// Package ether translates between Ethernet and IPoIB, for interfaces that are
// Ethernet to the kernel. Each neighbour with its 20-octet address gets an
// Ethernet address of its own, made locally; ARP and neighbour discovery are
// rewritten. There is no I/O in it.
//
// The Ethernet address is a hash of queue pair and GID, so all hosts make the
// same one for a neighbour. What a host writes into a packet as its own Ethernet
// address, as DHCP does, therefore names it at the others too. Of two neighbours
// with the same hash the later one gets another address, which then is good on
// this host alone.
package ether
