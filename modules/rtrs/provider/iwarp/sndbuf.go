package iwarp

import (
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A send buffer holds the bytes in flight (rate times round trip time) and the
// bytes that wait to be sent. In a larger one, data leaves the CPU cache before
// it is sent: the size that the kernel chooses, up to 4 MiB, costs large
// requests a tenth to a fifth of their throughput if the peer is near.
const (
	sendWaiting = 384 << 10 // bytes
	sendRate    = 4 << 10   // bytes per microsecond, more than one connection reaches
	// sendMost is the size in bytes from which the kernel chooses: its own size
	// grows with need.
	sendMost = 4 << 20
)

// fitSendBuffer limits the send buffer of a new connection to the need of its
// round trip time. If the process may not set that size, the kernel goes on to
// choose: a size once set is final, and the buffer would not grow any more.
func fitSendBuffer(fd int) {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return
	}
	size := sendBufferFor(time.Duration(info.Min_rtt) * time.Microsecond)
	if size >= sendMost {
		return
	}
	// The kernel doubles the number, for its own records.
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, size/2) != nil && fitsBelow(2*wmemMax(), size) {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, size/2)
	}
}

// fitsBelow reports whether a buffer of at most most bytes serves as well as
// one of size: it holds the bytes in flight and most of the waiting ones.
func fitsBelow(most, size int) bool { return most >= size*3/4 }

// wmemMax returns the largest size that the kernel accepts without privileges, in
// bytes. If that cannot be read, it is the default of Linux.
var wmemMax = sync.OnceValue(func() int {
	b, err := os.ReadFile("/proc/sys/net/core/wmem_max")
	if n, bad := strconv.Atoi(strings.TrimSpace(string(b))); err == nil && bad == nil {
		return n
	}
	return 212992
})

// sendBufferFor returns the size in bytes for a round trip time.
func sendBufferFor(rtt time.Duration) int {
	return sendWaiting + int(min(rtt, time.Second)/time.Microsecond)*sendRate
}
