// Package gso segments large TCP packets of the kernel into packets that fit
// the MTU, as large send offload of an adapter does, and joins received ones,
// as large receive offload does.
//
// It does no I/O.
package gso
