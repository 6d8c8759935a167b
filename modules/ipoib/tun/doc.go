// Package tun makes the network interface that an IPoIB interface shows to the
// kernel: a TUN device of the hardware type InfiniBand, or a TAP device.
//
// Such a TUN device has no link-layer address in the kernel: the TUN driver knows
// the address length of a few hardware types only, and not of this one. The
// 20-octet address of the interface exists in this process and on the wire.
//
// The device is made in the network namespace of the calling thread and needs
// CAP_NET_ADMIN there. It ends with the process, or by Close.
package tun
