// Package rocev2 is RoCEv2 in user space: InfiniBand's reliable connections in
// UDP datagrams on port 4791, with the InfiniBand connection manager. The peer
// may be a Linux kernel over rxe, an RDMA adapter, or this package. This end needs
// no module and no device.
//
// The wire is described in docs/extend/protocol/rocev2.md.
//
//	dev, err := rocev2.Open(rocev2.Config{Addrs: []netip.Addr{addr}})
//	pd, err := dev.AllocPD()
//	mr, err := pd.RegMR(buf, verbs.AccessRemoteWrite)
//	cq, err := dev.CreateCQ(128)
//	qp, err := dev.CreateQP(pd, verbs.QPConfig{CQ: cq, SendQueue: 64, RecvQueue: 64, MaxSGE: 2})
//	private, err := dev.Connect(ctx, qp, verbs.ConnectParams{Dst: peer})
//
// # Addresses
//
// UDP port 4791 of an address belongs to one device of one process. Addresses
// are bound by Open, or when Listen or Connect first name them, and stay bound
// until the device and all its completion queues are closed. The port numbers
// of Listen and Connect are those of rdma_cm, carried in connection requests.
//
// # The data path
//
// The files in the order a packet meets them: internal/softverbs (queues),
// requester.go (work requests become packets; acknowledgements, repetition),
// outbox.go (one sendmmsg of segmented sends for all connections), inbox.go
// (one recvmmsg into staging buffers), prediction.go (payload of long WRITEs is
// received in place), cq.go (the connection of a packet, and whether it is
// genuine), responder.go (order, rights, placement, answers). Everything there
// runs in the owner of the completion queue and allocates nothing. Poll drives
// it, with all timers; Arm lets the owner sleep.
//
// Every completion queue has a socket of its own at each address. The kernel
// picks it by the low byte of the destination queue pair number (socket.go).
//
// # The control path
//
// Messages of the connection manager go to queue pair 1. They come to a socket
// of their own. One goroutine per address reads it (cm.go, dial.go, listen.go,
// handshake_limiter.go, mtu.go). An established connection is given to the completion
// queue through softverbs.Pending. Disconnect and Destroy use that too.
//
// # Datagrams
//
// UD queue pairs (ud_qp.go) share one socket of each address. A goroutine reads
// it (ud_agent.go).
//
// # Hazards
//
// There is no secret on the wire. A host that sends with the address of a peer and
// guesses a queue pair number, a sequence number and a key can write. Use a
// network that keeps forged addresses out.
//
// A signalled request is complete when the peer has acknowledged it, so its
// memory is read again if a packet was lost. Closing a region before then
// costs a copy of the bytes that are not acknowledged.
//
// Without privilege the receive buffers are as large as net.core.rmem_max
// allows; with its usual default, bursts are lost and sent again. The log line of
// an address shows the size. Large buffers also widen the window of packets in
// flight (requester.go), as if those of the peer were as large.
//
// The loss of a peer is noticed only while an answer is due, after
// Config.RetryTimeout.
package rocev2
