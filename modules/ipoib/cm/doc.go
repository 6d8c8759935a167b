// Package cm makes and keeps the reliable connections of IPoIB's connected mode
// (RFC 4755).
//
// As in Linux, a connection carries frames one way: the interface that has
// something to send connects, the other one receives. Two interfaces that send to
// each other have two connections.
//
//	sender                                        receiver
//	Lookup -> Connecting -- REQ, service ID ----> listener: private data is checked,
//	          Up         <- REP, receive MTU ---- receives are posted
//	Send   -> ring of registered memory --------> Config.Receive
//
// A peer that refuses gets datagrams for Config.Retry. A connection that fails
// is removed; the next frame makes another one.
//
// # Goroutines
//
// A Manager has one that owns the completion queue, one for each of the two
// service IDs it listens at, and one for each connection that is being made. All
// end in Close.
package cm
