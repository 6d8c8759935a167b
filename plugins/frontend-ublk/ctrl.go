package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

const controlPath = "/dev/ublk-control"

// ctrlDevice speaks to the driver's control device.
type ctrlDevice struct {
	path string
	do   func(cmd uint32, r ctrlRequest) error // one command and its answer
	// devices returns the numbers of all devices.
	devices func() []uint32

	mu       sync.Mutex
	file     *os.File // open from the first use on
	encoded  bool     // commands are ioctl numbers
	features uint64   // 0: unknown, before Linux 6.4
}

func newControl() *ctrlDevice {
	c := &ctrlDevice{path: controlPath, devices: listDevices}
	c.do = c.sendCommand
	return c
}

// listDevices finds the devices by their character devices.
func listDevices() (all []uint32) {
	names, _ := filepath.Glob("/dev/ublkc*") // fails for a bad pattern only
	for _, name := range names {
		if id, err := strconv.ParseUint(strings.TrimPrefix(name, "/dev/ublkc"), 10, 32); err == nil {
			all = append(all, uint32(id))
		}
	}
	return all
}

// openCtrl opens the control device and probes the driver's features and command
// encoding. The error wraps ENODEV if there is no driver, EACCES or EPERM if
// permission is missing.
func (c *ctrlDevice) openCtrl() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.file != nil {
		return nil
	}
	if err := uring.Supported(); err != nil {
		return fmt.Errorf("ublk needs io_uring: %w: %w", err, blk.ENODEV)
	}
	f, err := os.OpenFile(c.path, os.O_RDWR, 0)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENODEV), errors.Is(err, syscall.ENXIO):
		return fmt.Errorf("this kernel has no ublk driver (no %s): load it with `modprobe ublk_drv`, Linux 6.0 or later: %w", c.path, blk.ENODEV)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%s may not be opened, ublk devices need root: %w", c.path, blk.EACCES)
	case err != nil:
		return err
	}
	c.file = f
	c.readFeatures()
	return nil
}

// readFeatures reads the driver's features. Only drivers with encoded commands have
// the command for it.
func (c *ctrlDevice) readFeatures() {
	c.encoded = true
	page, err := newPage()
	if err != nil {
		return
	}
	if err := c.do(cmdGetFeatures, ctrlRequest{buf: page, n: 8, limit: commandTime}); err == nil {
		c.features = native.Uint64(page)
	} else {
		c.encoded = false
	}
	freePage(page, err)
}

// ioCommands returns the two commands of tags, in the encoding of this kernel.
func (c *ctrlDevice) ioCommands() (fetch, again uint32) {
	if c.encoded {
		return ioEncoded(ioFetch), ioEncoded(ioCommitAndFetch)
	}
	return ioFetch, ioCommitAndFetch
}

// commandTime bounds commands that wait for no user of the disk.
const commandTime = 10 * time.Second

// ctrlRequest has the arguments of a control command.
type ctrlRequest struct {
	id    uint32 // of the device
	buf   []byte // a page, see newPage; nil: none
	n     int    // bytes of it
	data  uint64
	limit time.Duration
}

// errLate means that the driver has not answered in time. It may still answer,
// and write to the command's page.
var errLate = fmt.Errorf("the ublk driver has not answered in time: %w", blk.ETIMEDOUT)

// sendCommand sends one command and waits for its answer, at most for r.limit. Each
// command has its own io_uring, so that a command that hangs delays no other.
func (c *ctrlDevice) sendCommand(cmd uint32, r ctrlRequest) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ring, err := uring.NewRing(2, uring.Options{SQE128: true})
	if err != nil {
		return err
	}
	defer ring.Close()
	s := ring.Next()
	if c.encoded {
		cmd = encodedCommand(cmd)
	}
	s.URingCmd(int32(c.file.Fd()), cmd)
	var addr uint64
	if r.buf != nil {
		addr = uring.Address(r.buf)
	}
	putCtrl(ring.Cmd(s), r.id, addr, r.n, r.data)
	if err := ring.Submit(); err != nil {
		return err
	}
	return awaitCompletion(ring, r.limit)
}

// awaitCompletion waits for the one completion of ring.
func awaitCompletion(ring *uring.Ring, limit time.Duration) error {
	const look = 20 * time.Millisecond // between looks, in case no wake-up comes
	var done [1]uring.CQE
	for end := time.Now().Add(limit); ; {
		if ring.Run(); ring.Peek(done[:]) == 1 {
			if done[0].Res < 0 {
				return syscall.Errno(-done[0].Res)
			}
			return nil
		}
		if time.Now().After(end) {
			return errLate
		}
		fds := []unix.PollFd{{Fd: int32(ring.FD()), Events: unix.POLLIN}}
		unix.Poll(fds, int(look.Milliseconds()))
	}
}

// newPage returns memory for a command's buffer, outside of the Go heap: a late
// driver must not write to memory that has been reused.
func newPage() ([]byte, error) {
	return unix.Mmap(-1, 0, int(pageSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
}

// freePage unmaps page unless err is errLate: then the driver may still write
// to it.
func freePage(page []byte, err error) {
	if !errors.Is(err, errLate) {
		unix.Munmap(page)
	}
}

// withPage runs a command with a buffer: put fills it before, get reads it
// after. Either may be nil.
func (c *ctrlDevice) withPage(cmd uint32, r ctrlRequest, put, get func([]byte)) (err error) {
	page, err := newPage()
	if err != nil {
		return err
	}
	defer func() { freePage(page, err) }()
	if put != nil {
		put(page)
	}
	r.buf, r.limit = page, commandTime
	if err = c.do(cmd, r); err == nil && get != nil {
		get(page)
	}
	return err
}

// addDevice makes a device and updates info with the driver's changes.
func (c *ctrlDevice) addDevice(info *devInfo) error {
	return c.withPage(cmdAddDev, ctrlRequest{id: info.id, n: devInfoSize}, info.encodeInto, info.decodeFrom)
}

func (c *ctrlDevice) deviceInfo(id uint32) (deviceInfo devInfo, err error) {
	err = c.withPage(cmdGetDevInfo, ctrlRequest{id: id, n: devInfoSize}, nil, deviceInfo.decodeFrom)
	return deviceInfo, err
}

func (c *ctrlDevice) setParams(id uint32, p *ublkParams) error {
	return c.withPage(cmdSetParams, ctrlRequest{id: id, n: paramsSize}, p.encodeInto, nil)
}

// canResize reports whether the driver can change the size of disks.
func (c *ctrlDevice) canResize() bool { return c.features&featUpdateSize != 0 }

// resizeDevice changes the size of a disk. The caller makes sure that the disk exists:
// drivers before Linux 7.0 crash the kernel otherwise.
func (c *ctrlDevice) resizeDevice(id uint32, size uint64) error {
	return c.do(cmdUpdateSize, ctrlRequest{id: id, data: size / blk.SectorSize, limit: commandTime})
}

// deviceSize returns the device's size in bytes, as it was set last.
func (c *ctrlDevice) deviceSize(id uint32) (deviceSize uint64, err error) {
	put := func(b []byte) { native.PutUint32(b, paramsSize) }
	err = c.withPage(cmdGetParams, ctrlRequest{id: id, n: paramsSize}, put, func(b []byte) { deviceSize = sizeIn(b) })
	return deviceSize, err
}

// startDevice makes the disk appear. The kernel reads the partition table before it
// returns, so requests must be served meanwhile.
func (c *ctrlDevice) startDevice(id uint32, limit time.Duration) error {
	return c.do(cmdStartDev, ctrlRequest{id: id, data: uint64(os.Getpid()), limit: limit})
}

// stopDevice removes the disk after its last request.
func (c *ctrlDevice) stopDevice(id uint32, limit time.Duration) error {
	return c.do(cmdStopDev, ctrlRequest{id: id, limit: limit})
}

// deleteDevice deletes the device. It waits until all openers have closed the disk.
func (c *ctrlDevice) deleteDevice(id uint32, limit time.Duration) error {
	return c.do(cmdDelDev, ctrlRequest{id: id, limit: limit})
}

func (c *ctrlDevice) startRecovery(id uint32) error {
	return c.do(cmdStartUserRecovery, ctrlRequest{id: id, limit: commandTime})
}

func (c *ctrlDevice) endRecovery(id uint32, limit time.Duration) error {
	return c.do(cmdEndUserRecovery, ctrlRequest{id: id, data: uint64(os.Getpid()), limit: limit})
}
