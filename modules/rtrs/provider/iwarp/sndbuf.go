package iwarp

import (
	"os"
	"strconv"
	"strings"
	"sync"
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
// what its round trip needs. Who may not have as much keeps the kernel's own
// choice: a limit, once set, stays, and the buffer would not grow any more.
func fitSendBuffer(fd int) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return
	}
	size := sendBufferFor(time.Duration(info.Min_rtt) * time.Microsecond)
	if size >= sendMost {
		return
	}
	// The kernel doubles the number, to have room for its own records.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size/2) != nil && fitsBelow(2*wmemMax(), size) {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size/2)
	}
}

// fitsBelow tells whether a buffer that the kernel cuts at most does as well as one
// of size: what is on the way has place in it, and most of what waits.
func fitsBelow(most, size int) bool { return most >= size*3/4 }

// wmemMax is the largest size that the kernel takes from users without privileges,
// or what it has been for decades.
var wmemMax = sync.OnceValue(func() int {
	b, err := os.ReadFile("/proc/sys/net/core/wmem_max")
	if n, bad := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && bad == nil {
		return n
	}
	return 212992
})

// sendBufferFor is the size for a round trip.
func sendBufferFor(rtt time.Duration) int {
	return sendWaiting + int(min(rtt, time.Second)/time.Microsecond)*sendRate
}
