// Package gcm is AES-GCM (NIST SP 800-38D) with eight blocks at a time, in
// registers of 256 bits.
//
// crypto/cipher uses those of 128 bits. Where the CPU has no instructions for
// the wider ones, New returns the cipher of that package. Both have the same
// results.
//
// No step depends on secret data in its time: AES and the multiplications are
// instructions, and the arithmetic of New uses masks.
package gcm
