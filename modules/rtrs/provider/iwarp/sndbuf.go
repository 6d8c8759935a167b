package iwarp

import (
	"time"

	"golang.org/x/sys/unix"
)

// A send buffer holds what is on the way, which is the rate times the round trip,
// and what waits to be sent. More only drives data out of the CPU's cache before
// it is sent or received: the kernel's own choice, up to 4 MiB, costs large
// requests a tenth to a fifth of their throughput where the peer is near.
const (
	sendWaiting = 384 << 10 // bytes
	sendRate    = 4 << 10   // bytes per microsecond, above what one connection reaches
	// sendMost is the size from which the kernel's own choice stays, which grows
	// with need.
	sendMost = 4 << 20
)

// fitSendBuffer limits the send buffer of a connection that has just been made to
// what its round trip needs. A refusal costs speed only.
func fitSendBuffer(fd int) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return
	}
	if size := sendBufferFor(time.Duration(info.Min_rtt) * time.Microsecond); size < sendMost {
		// The kernel doubles the number, to have room for its own records.
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size/2)
	}
}

// sendBufferFor is the size for a round trip.
func sendBufferFor(rtt time.Duration) int {
	return sendWaiting + int(min(rtt, time.Second)/time.Microsecond)*sendRate
}
