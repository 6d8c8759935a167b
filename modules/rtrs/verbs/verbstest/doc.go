// Package verbstest is the conformance suite of package verbs. Whoever writes
// a provider runs it:
//
//	func TestConformance(t *testing.T) {
//		verbstest.Run(t, func(t *testing.T) verbstest.Fabric {
//			client, server := ..., ...
//			return verbstest.Fabric{Client: client, Server: server, Addr: netip.MustParseAddrPort("127.0.0.1:0")}
//		})
//	}
//
// Every case gets a fabric of its own. Cases that need an ability are skipped
// by name if the device does not have it; another case requires that a posted
// request without the ability fails with verbs.ErrUnsupported.
//
// The suite sleeps nowhere and assumes no speed: a case that polls fails when
// nothing happens for Patience, by the clock and in CPU time of the test.
//
// The suite leaves open the points in which providers differ: whether a
// request completes when it was executed by the peer or when it was handed to
// a reliable stream; whether local memory outside its region is refused by
// PostSend or by a completion; whether room in the send queue comes back at
// once or with a signalled completion; the exact depth of a queue, if it is
// at least the requested one.
package verbstest
