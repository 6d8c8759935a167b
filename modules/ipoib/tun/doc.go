// Package tun makes the network interface that an IPoIB interface shows to the
// kernel: a TUN device of the hardware type InfiniBand.
//
// The kernel gives such a device no link-layer address: its driver knows the
// address length of some hardware types only, and not of this one. The 20-octet
// address of the interface exists in this process and on the wire.
//
// Opening a device needs CAP_NET_ADMIN in the network namespace of the calling
// thread, in which the device is made. It ends with the process, or by Close.
package tun
