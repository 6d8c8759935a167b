// Package ibverbs is RDMA by hardware, or by a kernel that imitates it (rxe):
// libibverbs for the queues, librdmacm for connections. It is the only package
// with cgo.
//
// The headers are needed when it is built (build tag ibverbs, cgo enabled),
// the libraries when it is used: they are opened at run time, so that one
// program runs with and without them. Built without the tag, Open returns a
// Fabric whose errors name the missing part.
//
//	f := ibverbs.Open(ibverbs.Config{})
//	dev, err := f.DeviceFor(ctx, netip.Addr{}, peer) // the device that routes to peer
//	pd, err := dev.AllocPD()
//	...
//
// A Fabric stands for all devices of the host (verbs.Chooser). Each has
// protection domains, queues and keys of its own.
//
// # The data path
//
// qp.go (PostSend, PostRecv) writes requests into an array that C reads; cq.go
// (Poll, Flush) crosses into C once to post all of them and to take
// completions; verbs.c converts them into the library's requests. Nothing
// there locks or allocates.
//
// # The control path
//
// One goroutine reads the events of the connection manager and of the devices
// (fabric.go) and gives them to the queue pair or the listener they are for
// (dial.go, listen.go). The library's queue pair is made when a connection is
// made, because its port is known only then; receives posted before wait for
// it.
//
// The end of a connection: Disconnect puts the queue pair into its error state,
// the owner of the completion queue stops posting, and the queue pair is
// destroyed. From then on no device touches memory. Work completed by then is
// delivered, the rest is flushed, and OpDisconnected follows. No device is
// relied on to flush.
//
// # Keys
//
// OpLocalInv and OpRegMR move memory windows of type 1. These belong to a
// protection domain and not to a queue pair. When a device is first used it is
// tested for them (rv_probe in verbs.c); a device that fails has no
// CapKeyRotation.
//
// # Hazards
//
// Registered memory is locked: see registerError. Memory must stay mapped as it
// is while it is registered; a hole punched into it stays in use by the device.
package ibverbs
