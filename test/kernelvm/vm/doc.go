// Package vm boots a Linux guest and runs commands in it.
//
//	g := vm.Boot(t, vm.Config{Net: vm.Tap})
//	g.RXE(t, "rxe0", "10.1.0.1/24")
//	g.Modprobe(t, "rnbd-server")
//	g.WriteFile(t, "/sys/...", "...")
//	out := g.Run(t, "fio", "--filename=/dev/rnbd0", ...)
//
// The guest has a kernel of package kernel and the host's files: the host's
// root is its root, read-only under a file system in memory, so new programs
// are there under their own names, and the guest's writes are gone with it.
// Files that the host changes after the guest has seen them may look old: use
// new names. /dev, /proc, /sys and /run are the guest's own.
//
// Nothing virtualizes in hardware here: a guest is emulated, boots in about ten
// seconds, and computes ten to twenty times slower than the host. It ends
// with the test, by process id.
//
// The kernel's log must stay clean: Boot, and Watch for guests that several
// tests share, fail a test if the guest's kernel warned of itself.
package vm
