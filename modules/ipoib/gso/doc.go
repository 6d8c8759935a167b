// Package gso segments large packets, as an adapter with large send offload does:
// one TCP packet of the kernel's becomes packets that fit the MTU.
//
// It does no I/O and keeps no state.
package gso
