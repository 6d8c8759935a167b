// Package verbs is the seam between RTRS and the fabrics that carry it.
//
// RTRS speaks to this package only; a fabric (software iWARP, RoCEv2,
// libibverbs, the in-process loopback) is a provider that implements it. The
// shape is that of RDMA reliable connections: protection domains, memory
// regions named by keys, queue pairs that take batches of work requests, and
// completion queues that are polled in batches.
//
// # Threads
//
// A completion queue has one owner: the goroutine (usually a locked thread)
// that calls Poll. The queue pairs created on it share that owner: PostSend,
// PostRecv after the connection is up, and Poll are called by the owner alone
// and take no lock. Everything marked "any goroutine" is control path: it may
// lock, allocate and block.
//
// A software provider starts no goroutine for data. It makes progress inside
// Poll: queued sends leave, sockets are read, completions are returned. FD and
// Arm let the owner sleep.
//
// # Memory
//
// Memory that a provider may touch is registered. It is the caller's again when
// MR.Close has returned: from then on no provider reads or writes it, even if a
// packet has to be repeated or a peer keeps writing. A completion gives the
// elements of its request back for reuse, not for unmapping.
//
// # A connection's life
//
//	active:  CreateQP -> PostRecv -> Connect -> post and poll -> Disconnect -> ... OpDisconnected -> Destroy
//	passive: Accept (request) -> CreateQP -> PostRecv -> request.Accept -> post and poll -> same end
//
// A connection that ends, for whatever reason, flushes every outstanding work
// request with StatusFlushed, signalled or not, exactly one completion each,
// then delivers one completion with OpDisconnected, the last of its queue pair.
//
// # Datagrams
//
// A fabric may have unreliable datagrams too: its Device is a DatagramDevice then.
// They need no completion queue; RTRS does not use them.
package verbs
