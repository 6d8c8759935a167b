package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/mdlayher/genetlink"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// The control interface of the kernel's NBD client, generic netlink:
// include/uapi/linux/nbd-netlink.h ("WITH Linux-syscall-note").
const (
	nlFamily  = "nbd"
	nlVersion = 1

	nlConnect     = 1
	nlDisconnect  = 2
	nlReconfigure = 3

	attrIndex       = 1  // 32 bits: N of /dev/nbdN
	attrSize        = 2  // 64 bits: bytes
	attrBlockSize   = 3  // 64 bits
	attrTimeout     = 4  // 64 bits: seconds until a request is sent again
	attrServerFlags = 5  // 64 bits: transmission flags
	attrSockets     = 7  // nested: items with descriptors
	attrDeadTime    = 8  // 64 bits: seconds that requests wait for a connection
	attrIdentity    = 10 // string, checked by later commands

	attrSockItem = 1
	attrSockFD   = 1
)

// diskConfig has the attributes of a disk for the kernel. Zero values are not
// sent.
type diskConfig struct {
	index     int // -1: the kernel chooses
	size      uint64
	block     uint64
	flags     uint16
	timeout   time.Duration
	deadTime  time.Duration
	identity  string
	sockets   []int // descriptors of the kernel's ends
	withFlags bool
}

// encodeAttributes makes the attributes of a command.
func (c *diskConfig) encodeAttributes() ([]byte, error) {
	e := netlink.NewAttributeEncoder()
	e.ByteOrder = binary.NativeEndian
	if c.index >= 0 {
		e.Uint32(attrIndex, uint32(c.index))
	}
	put := func(attr uint16, v uint64) {
		if v != 0 {
			e.Uint64(attr, v)
		}
	}
	put(attrSize, c.size)
	put(attrBlockSize, c.block)
	put(attrTimeout, uint64(c.timeout/time.Second))
	if c.withFlags {
		e.Uint64(attrServerFlags, uint64(c.flags))
	}
	put(attrDeadTime, uint64(c.deadTime/time.Second))
	if c.identity != "" {
		e.String(attrIdentity, c.identity)
	}
	if len(c.sockets) > 0 {
		e.Nested(attrSockets, func(e *netlink.AttributeEncoder) error {
			for _, fd := range c.sockets {
				e.Nested(attrSockItem, func(e *netlink.AttributeEncoder) error {
					e.Uint32(attrSockFD, uint32(fd))
					return nil
				})
			}
			return nil
		})
	}
	return e.Encode()
}

// kernelClient gives commands to the kernel's NBD client; a fake in tests.
type kernelClient interface {
	// sendCommand returns the index in the answer, or -1 if there is none. It owns
	// c.sockets and closes them when the kernel has answered, even after
	// command has returned: until then the descriptors must not be reused.
	sendCommand(cmd uint8, c *diskConfig) (int, error)
	// queueCount returns the number of connections of the disk with this index.
	queueCount(index int) int
	// mostConnections returns the number of connections that a disk can use.
	mostConnections() int
	// backendIdentity returns the backend identifier of the disk with this index, "" if
	// it has none. Known is false before Linux 5.14, because that does not show
	// it.
	backendIdentity(index int) (identity string, known bool)
	// listDisks returns the indices of all disks.
	listDisks() []int
}

// netlinkClient is the kernel's NBD client. Each command opens its own socket;
// commands are rare.
type netlinkClient struct{}

// errNoKernel means that the kernel has no NBD client, or that this process may
// not use it.
var errNoKernel = errors.New("the kernel's NBD client cannot be used")

// commandTime bounds a command. The kernel executes it within the system call.
const commandTime = 10 * time.Second

func (netlinkClient) sendCommand(cmd uint8, c *diskConfig) (int, error) {
	type answer struct {
		index int
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		index, err := executeCommand(cmd, c)
		closeAll(c.sockets)
		done <- answer{index, err}
	}()
	select {
	case a := <-done:
		return a.index, a.err
	case <-time.After(commandTime):
	}
	select { // the process may have been stopped for that long
	case a := <-done:
		return a.index, a.err
	default:
		return -1, fmt.Errorf("the kernel's NBD client has not answered within %s: %w", commandTime, blk.ETIMEDOUT)
	}
}

func (netlinkClient) backendIdentity(index int) (identity string, known bool) {
	disk := filepath.Join("/sys/block", filepath.Base(nodePath(index)))
	b, err := os.ReadFile(filepath.Join(disk, "backend"))
	if err == nil {
		return strings.TrimSuffix(string(b), "\n"), true
	}
	if _, derr := os.Stat(disk); derr != nil { // or there is no sysfs here
		return "", false
	}
	return "", errors.Is(err, os.ErrNotExist) && tellsBackends()
}

func (netlinkClient) listDisks() (all []int) {
	names, _ := filepath.Glob("/sys/block/nbd*") // fails for a bad pattern only
	for _, name := range names {
		if index, ok := indexOf("/dev/" + filepath.Base(name)); ok {
			all = append(all, index)
		}
	}
	return all
}

// tellsBackends reports whether the kernel's version shows backend identifiers.
// A disk without the attribute may be one of an old kernel, or one that was
// made without an identifier.
func tellsBackends() bool {
	var u unix.Utsname
	var major, minor int
	if unix.Uname(&u) != nil {
		return false
	}
	if n, _ := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &major, &minor); n != 2 {
		return false
	}
	return major > 5 || major == 5 && minor >= 14
}

// mostConnections returns the number of processors: each connection serves one
// hardware queue, and a disk has at most one of these per processor.
func (netlinkClient) mostConnections() int { return runtime.NumCPU() }

// queueCount counts the disk's hardware queues.
func (netlinkClient) queueCount(index int) int {
	queues, err := os.ReadDir(filepath.Join("/sys/block", filepath.Base(nodePath(index)), "mq"))
	if err != nil {
		return 1
	}
	return max(1, len(queues))
}

func executeCommand(cmd uint8, c *diskConfig) (int, error) {
	conn, err := genetlink.Dial(nil)
	if err != nil {
		return -1, fmt.Errorf("%w: %w", errNoKernel, err)
	}
	defer conn.Close()
	family, err := conn.GetFamily(nlFamily)
	if errors.Is(err, os.ErrNotExist) {
		return -1, fmt.Errorf("%w: it is not there, load it with `modprobe nbd`: %w", errNoKernel, blk.ENODEV)
	}
	if err != nil {
		return -1, fmt.Errorf("%w: %w", errNoKernel, err)
	}
	data, err := c.encodeAttributes()
	if err != nil {
		return -1, err
	}
	msgs, err := conn.Execute(genetlink.Message{
		Header: genetlink.Header{Command: cmd, Version: nlVersion}, Data: data,
	}, family.ID, netlink.Request|netlink.Acknowledge)
	if errors.Is(err, syscall.EPERM) {
		return -1, fmt.Errorf("%w: it takes root (CAP_SYS_ADMIN): %w", errNoKernel, err)
	}
	if err != nil {
		return -1, err
	}
	for _, m := range msgs {
		if index, err := indexIn(m.Data); err == nil {
			return index, nil
		}
	}
	return -1, nil
}

// indexIn finds the index in the attributes of an answer.
func indexIn(data []byte) (int, error) {
	d, err := netlink.NewAttributeDecoder(data)
	if err != nil {
		return -1, err
	}
	d.ByteOrder = binary.NativeEndian
	index := -1
	for d.Next() {
		if d.Type() == attrIndex {
			index = int(d.Uint32())
		}
	}
	if err := d.Err(); err != nil {
		return -1, err
	}
	if index < 0 {
		return -1, errors.New("no index")
	}
	return index, nil
}
