// Package siw tests the iwarp provider against siw, the software iWARP of the
// Linux kernel: one end of each connection is the provider's, the other siw's,
// by way of the ibverbs provider. Its tests run where there is a device siw0;
// test/kernelvm runs them in a guest that has one.
package siw
