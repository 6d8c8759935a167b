// Package rtrs is a transport for requests over RDMA: sessions of several
// paths, each of several connections, with memory reserved on the server for
// every request a client may have under way. On the wire it is the Linux
// kernel's RTRS (docs/extend/protocol/rtrs.md); the fabrics are providers of package
// verbs, handed in by the caller.
//
// # Words
//
// A session joins a client and a server. It has a name, a queue depth and as
// many chunks of server memory. A path is one pair of addresses; it has its own
// connections, keys and heartbeats. Connection 0 (cid 0) is for administration,
// the others are queues of I/O. A permit is one number with three uses: the
// client's right to send a request, the chunk it is written to, and its name in
// the answer. An rkey makes a chunk reachable for the client.
//
// # Client
//
//	s, err := rtrs.Open(ctx, "name", []rtrs.PathAddr{{Device: dev, Dst: addr}}, cfg)
//	r, err := s.Register(memory)
//	err = s.Queue(0).Write(tag, rtrs.Data{Region: r, Len: 4096}, userMessage)
//	// ... cfg.OnDone(0, tag, errno)
//
// # Server
//
//	cfg := rtrs.DefaultServerConfig()
//	cfg.Pollers, cfg.Handler, cfg.Alloc = pollers, handler, alloc
//	srv, err := rtrs.NewServer(cfg)
//	addr, err := srv.Listen(dev, netip.MustParseAddrPort("[::]:1234"))
//	// ... handler.Request(op): op.User(), op.Data(), op.Respond(errno)
//
// # A client's path
//
// A path is run by one goroutine. No other changes its state. Each time it
// connects it gets a new link: connections, keys, heartbeat. A link that is
// lost never comes back.
//
//	     Open, AddPath
//	          |
//	          v       failed      +----------------+
//	+--> connecting ------------> | connecting_err |
//	|         |                   +----------------+
//	|         | INFO_RSP is good          |
//	|         v                           |
//	|     connected                       |
//	|         | lost, or reconnect        |
//	|         v                           |
//	+-- reconnecting <--------------------+
//	    ^        its time has come: connecting
//	    |
//	    | reconnect by hand
//	    |
//	 closed <---- closing <---- from each of the four above: by hand, or
//	    |                       no attempt is left, or (from connecting)
//	    | removed               the queue depth is another one
//	    v
//	  dead
//
// A path that is lost waits in reconnecting: first all of its connections are
// drained, so that nothing reads or writes the memory of its requests any more;
// then the requests are sent again on another path, each by the owner of its
// queue (clt_failover.go); then the path waits for its next attempt.
//
// # A request
//
//	        Write, Read                      answer
//	idle ----------------> in flight ---------------------> idle
//	                        |     ^
//	     its path is lost   |     | nothing of the path can run late (fenced),
//	                        v     | and another path takes it
//	                        lost -+
//	                        |
//	no path is left:        v               fenced
//	OnDone(Lost)          aborted ---------------------> idle
//
// A request keeps its permit until it is idle. Between two ends of this project
// a lost path is fenced. A FENCE on another path makes the server close the
// lost one and wait for its operations; or the server accepts the path again,
// and it does so only after that wait. The wait is bounded: after it the other
// requests are sent again, and the permit of a chunk with a running operation
// is not given back. A server without that extension, such as the kernel's,
// gets the request again at once.
//
// # Threads
//
// A Poller is polled by one goroutine, its owner, usually a locked thread that
// polls other things too. A connection belongs to one poller for life, and all
// that happens to a request happens on that thread: no lock, no channel, no
// allocation. Queue.Write, Queue.Read and Op.Respond are the owner's; whatever
// opens, closes or asks may be called by any other goroutine, and waits for the
// owner where it must. So never call those from the owner itself, that is from
// OnDone, OnPermit or ServerHandler.Request. OnEvent has a goroutine of its own.
// Heartbeats are sent by the owner of connection 0, woken by the poller's timer;
// no goroutine has one while nothing happens.
//
// # Hazards
//
// The memory of a chunk stays writable for a client that has plain keys, and
// that of a request belongs to the fabric until its completion. Look at data
// once. A request that ended with Lost may have been executed, and on a
// server without FENCE may still be: send it again unchanged, or report it. Wait
// for SessionUp before you send it again. Close sessions and servers before
// their pollers stop.
package rtrs
