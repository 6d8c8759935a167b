// Package netguest tests IPoIB and bonding with Linux as the other side: its
// bonding driver over interfaces of rnbd-net, and UD queue pairs of its software
// RoCE. The tests run in a guest that test/kernelvm makes; elsewhere they are
// skipped.
//
// For bonding there are two hosts and two switches, each host a network namespace:
//
//	one: e0 10.0.0.1, e1 10.1.0.1      two: e0 10.0.0.2, e1 10.1.0.2
//	      '------------ br0 --- sw --- br1 ------------'
//
// The commands on the hosts are those of cmd/rnbd-net/README.md, as they are
// written there.
package netguest
