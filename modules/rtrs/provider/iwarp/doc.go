// Package iwarp is the software iWARP provider: RDMA over an ordinary TCP
// connection, in user space, with nothing installed on either end.
//
// The wire is RFC 5044 (MPA, without markers), RFC 5041 (DDP), RFC 5040
// (RDMAP), RFC 6581 (enhanced connection setup) and RFC 7306 (Immediate Data).
// Between two ends of this package an 8-byte block in front of the private
// data announces Immediate Data and one experimental opcode that carries SEND
// WITH IMM; see docs/extend/protocol/iwarp.md. With Config.Foreign the block is off,
// the peer may be any iWARP stack, and the device reports no immediates.
//
//	dev, err := iwarp.Open(iwarp.DefaultConfig())
//	pd, err := dev.AllocPD()
//	mr, err := pd.RegMR(buf, verbs.AccessRemoteWrite)
//	cq, err := dev.CreateCQ(128)
//	qp, err := dev.CreateQP(pd, verbs.QPConfig{CQ: cq, SendQueue: 64, RecvQueue: 64, MaxSGE: 2})
//	private, err := dev.Connect(ctx, qp, verbs.ConnectParams{Dst: addr})
//
// # The data path
//
// The files in the order a byte meets them: internal/softverbs (queues), tx.go
// (one sendmsg for all work requests that are ready), segment.go (messages become
// segments), rx.go and check.go (recvmsg into the destination and a staging
// buffer; segments are parsed, checked, placed), cq.go (Poll drives all of it, Arm
// lets the owner sleep). Everything there runs in the owner of the completion queue and
// allocates nothing.
//
// With TLS (tls.go) rx.go is fed from opened records, and the list of tx.go is
// sealed into records. Both happen in the owner, too.
//
// # Threads
//
// MPA start-up, and the TLS handshake before it, run in control goroutines on
// net.Conn. The socket is then given to the completion queue through
// softverbs.Pending. Disconnect and Destroy use that too. The table of memory
// regions is shared by all queues: lookups and key rotation are atomic,
// registration takes a lock.
//
// Registered memory is touched inside Poll, Flush and Arm only. MR.Close removes
// the region from the table, asks the owners to end the connections with work
// that names it, and waits for calls of the owners to return.
//
// # Hazards
//
// A signalled SEND or WRITE is complete when the socket has taken its bytes,
// not when the peer has them. A FIN is the end of both directions. A peer that
// overruns the posted receives is not read from until a receive is posted, and
// for at most Config.RNRTimeout.
//
// Payload that is being received into a region while another queue invalidates
// its key may still be placed: the key is checked before every receive call, not
// during it.
package iwarp
