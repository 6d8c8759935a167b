package verbstest

import (
	"net/netip"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Patience is how long a case waits for the next thing to happen. Providers that
// are tested on slow machines change it before Run.
var Patience = 5 * time.Second

// Fabric is the provider's part of a case. Devices are closed by the
// provider's own cleanup; Client and Server may be the same device.
type Fabric struct {
	Client, Server verbs.Device
	Addr           netip.AddrPort // to listen at, and to connect to; port 0 picks one
	Addr6          netip.AddrPort // the same for IPv6; zero: not supported here
	Src            netip.Addr     // of the client where it is told to use one; zero: that of Addr

	// OwnGIDs: GIDs are not the devices' IP addresses, as on InfiniBand.
	OwnGIDs bool

	// VagueErrors: a fault in local memory completes with any error status, as
	// software in the kernel has it. Otherwise it is the one of the seam.
	VagueErrors bool

	// Garbage sends bytes that are no connection request to addr and returns
	// when they are on their way; nil: the fabric has no such thing.
	Garbage func(t *testing.T, addr netip.AddrPort)
}

// Run runs the suite. mk is called once per case.
func Run(t *testing.T, mk func(t *testing.T) Fabric) {
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			f := mk(t)
			if missing := c.needs &^ (f.Client.Info().Caps & f.Server.Info().Caps); missing != 0 {
				t.Skipf("the devices lack ability %#x", missing)
			}
			c.run(t, f)
		})
	}
}

type testCase struct {
	name  string
	needs verbs.Cap
	run   func(t *testing.T, f Fabric)
}

const capRotateImm = verbs.CapKeyRotation | verbs.CapSendImm

var cases = []testCase{
	// connect.go
	{"connect carries private data both ways", 0, connectPrivateData},
	{"connect tells both ends the addresses", 0, connectAddresses},
	{"connect works over IPv6", 0, connectIPv6},
	{"an IP address may be named as a GID", 0, connectGIDs},
	{"reject carries private data", 0, rejectPrivateData},
	{"connect fails where nobody listens", 0, connectAbsent},
	{"garbage never reaches accept", 0, garbage},
	{"cancelled connect returns", 0, connectCancelled},
	{"closed listener ends accept", 0, listenerClose},
	{"listener that was closed gives its address free", 0, listenerReuse},
	{"send before connect is refused", 0, sendUnconnected},

	// transfer.go
	{"every operation does its work", 0, operations},
	{"operations without the ability are refused", 0, unsupported},
	{"zero length writes ignore address and key", verbs.CapWriteImm, zeroLength},
	{"sizes from nothing to 1 MiB in one and many elements", 0, sizes},
	{"immediates keep every bit", verbs.CapWriteImm, immediates},
	{"write is in memory before the immediate that follows", verbs.CapWriteImm, writeBeforeImm},
	{"ten thousand messages in batches", verbs.CapWriteImm, pipeline},
	{"both ends write at the same time", 0, bothWays},
	{"unsignalled requests report nothing", 0, unsignalled},

	// queue.go
	{"message waits for a receive", 0, receiverNotReady},
	{"a late receiver holds up no other connection", 0, receiverNotReadyOther},
	{"full send queue refuses and recovers", 0, sendQueueFull},
	{"two connections share a queue", 0, sharedCQ},
	{"connections on different queues are independent", verbs.CapWriteImm, manyOwners},
	{"sixty four connections on one queue", 0, manyConns},

	// access.go
	{"message longer than its receive ends the connection", 0, recvTooSmall},
	{"memory that was not granted is out of reach", 0, outOfReach},
	{"local memory outside its region is refused", 0, localOutside},
	{"rotated key works and the old one does not", verbs.CapKeyRotation, rotateKey},
	{"key is fresh when the message about it arrives", capRotateImm, rotateChain},
	{"a region is rotated by two owners in turns", capRotateImm, rotateByTwo},
	{"send with invalidate takes the right away", verbs.CapSendInv | verbs.CapRecvInv, sendInvalidate},

	// region.go
	{"a region that is closed is left alone", 0, regionClosed},
	{"a region may be closed while the owners work", 0, regionClosedByOther},

	// teardown.go
	{"disconnect flushes every request once", 0, flushOnce},
	{"disconnect flushes requests that are not signalled", 0, flushUnsignalled},
	{"disconnect of either end reaches both", 0, disconnectReaches},
	{"disconnect right after accept reaches the peer", 0, disconnectAtOnce},
	{"disconnect may be called by anybody at any time", 0, disconnectConcurrent},
	{"connections come and go without a trace", 0, noLeak},

	// wake.go
	{"sleeping owners are woken by messages", 0, wakeMessages},
	{"sleeping owner is woken by disconnect", 0, wakeDisconnect},
	{"arm refuses while completions wait", 0, armRefuses},
}
