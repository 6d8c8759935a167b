// Package kernelvm tests with the Linux kernel as the peer: its rnbd and rtrs
// modules over software RoCEv2, in a guest of package vm.
//
//	make test-kernel                       all of them, the short form
//	make test-kernel-full                  with the tests that take minutes
//	RNBD_KERNEL=1 go test -run NAME -v .   one of them, in test/kernelvm
//
// A cell is a client and a server, ours or the kernel's, and a value of
// always_invalidate. A column is a fabric, and the place where our daemons run beside the
// kernel's modules: to test another one, add it to columns. Scenarios take a cell and
// speak of its client and its server alone.
//
// The recipes of docs/use/security.md for IPsec and WireGuard run between network
// namespaces of the guest: TestIPsec, TestWireGuard.
//
// They need root. The first run fetches Debian's kernel, its headers and its source
// (280 MB) and builds the modules, in about two minutes, into .cache/kernelvm of
// the repository; remove that folder to get a newer kernel.
package kernelvm
