package ibverbs

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// ErrNotBuilt: the program was built without this fabric.
var ErrNotBuilt = fmt.Errorf("fabric ibverbs is not built in: it needs cgo and the headers of rdma-core (Debian: gcc, libibverbs-dev, librdmacm-dev) "+
	"when the program is built, and the build tag ibverbs: %w", verbs.ErrUnsupported)

// ErrNoDevice: this host has no RDMA device, or none that the address is on.
var ErrNoDevice = errors.New("no RDMA device")

func noDevice() error {
	return fmt.Errorf("%w on this host: there is nothing in /sys/class/infiniband. A software device for a network interface is made by "+
		"\"rdma link add rxe0 type rxe netdev IFACE\" (Debian: iproute2, modules rdma_rxe, rdma_ucm and ib_uverbs); "+
		"the fabrics iwarp and rocev2 need none: %w", ErrNoDevice, syscall.ENODEV)
}

// libraryError explains a message of the dynamic linker.
func libraryError(said string) error {
	pkg := "libibverbs1 librdmacm1"
	switch {
	case strings.Contains(said, "librdmacm"):
		pkg = "librdmacm1"
	case strings.Contains(said, "libibverbs"):
		pkg = "libibverbs1 ibverbs-providers"
	}
	return fmt.Errorf("fabric ibverbs needs the libraries of rdma-core: %s: install the Debian package %s: %w", said, pkg, verbs.ErrUnsupported)
}

// registerError explains why size bytes were not registered on a device.
func registerError(device string, size int, errno syscall.Errno, m memlockUsage) error {
	err := fmt.Errorf("register %d bytes on %s: %w", size, device, errno)
	if errno != syscall.ENOMEM && errno != syscall.EPERM && errno != syscall.EAGAIN || m.unlimited {
		return err
	}
	if m.pinned+uint64(size) <= m.limit {
		return err
	}
	return fmt.Errorf("%w: RDMA memory is locked, and this process may lock %d bytes, of which %d are taken: it needs at least %d more. "+
		"Raise the limit (\"ulimit -l\", LimitMEMLOCK= of a systemd unit) to %d or grant CAP_IPC_LOCK",
		err, m.limit, m.pinned, m.pinned+uint64(size)-m.limit, m.pinned+uint64(size))
}

// memlockUsage is the limit of locked memory and its use, in bytes.
type memlockUsage struct {
	limit, pinned uint64
	unlimited     bool
}

// statusBytes returns the value of a line like "VmPin:	 4 kB".
func statusBytes(status, key string) uint64 {
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		fields := strings.Fields(value)
		if name != key || len(fields) == 0 {
			continue
		}
		kb, _ := strconv.ParseUint(fields[0], 10, 64)
		return kb << 10
	}
	return 0
}

// refusals of the connection manager that mean something to people.
const (
	rejectInvalidService = 8
	rejectConsumer       = 28
)

// rejectError explains a refusal that is not the peer's consumer's.
func rejectError(reason int) error {
	if reason == rejectInvalidService {
		return fmt.Errorf("nobody listens there on RDMA: %w", syscall.ECONNREFUSED)
	}
	return fmt.Errorf("the peer's connection manager refuses (reason %d): %w", reason, syscall.ECONNREFUSED)
}
