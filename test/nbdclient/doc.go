// Package nbdclient is a small NBD client for tests and for the demo: fixed
// newstyle, simple and structured replies, unix sockets and TCP, any number of
// requests at a time. It needs the standard library only, and shares no code with
// the NBD server of plugins/frontend-nbd or the client of "rnbd bench": a test has to
// notice when one of them misreads the protocol.
//
//	c, err := nbdclient.Dial(ctx, "unix", "/run/rnbd/nbd.sock", nbdclient.Options{Export: "disk0"})
//	defer c.Close()
//	_, err = c.WriteAt(data, 4096)
//	err = c.Flush()
//
// Methods may be called from many goroutines; each call waits for its own
// reply, so the depth of the pipeline is the number of callers.
package nbdclient
