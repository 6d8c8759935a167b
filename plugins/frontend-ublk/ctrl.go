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

// control speaks to the driver's control device.
type control struct {
	path string
	do   func(cmd uint32, r request) error // one command and its answer
	// devices are the numbers of all devices.
	devices func() []uint32

	mu       sync.Mutex
	file     *os.File // open from the first use on
	encoded  bool     // commands are ioctl numbers
	features uint64   // 0: the driver does not tell
}

func newControl() *control {
	c := &control{path: controlPath, devices: listDevices}
	c.do = c.send
	return c
}

// listDevices looks for the character devices, of which each device has one.
func listDevices() (all []uint32) {
	names, _ := filepath.Glob("/dev/ublkc*") // fails for a bad pattern only
	for _, name := range names {
		if id, err := strconv.ParseUint(strings.TrimPrefix(name, "/dev/ublkc"), 10, 32); err == nil {
			all = append(all, uint32(id))
		}
	}
	return all
}

// open makes sure that there is a driver and finds out how to speak to it. The
// errors say what is missing: ENODEV no driver, EACCES or EPERM no right.
func (c *control) open() error {
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
	c.probe()
	return nil
}

// probe asks for the features, which only an encoded command can.
func (c *control) probe() {
	c.encoded = true
	page, err := newPage()
	if err != nil {
		return
	}
	if err := c.do(cmdGetFeatures, request{buf: page, n: 8, limit: commandTime}); err == nil {
		c.features = native.Uint64(page)
	} else {
		c.encoded = false
	}
	freePage(page, err)
}

// ioCommands are the two commands of tags, in the encoding of this kernel.
func (c *control) ioCommands() (fetch, again uint32) {
	if c.encoded {
		return ioEncoded(ioFetch), ioEncoded(ioCommitAndFetch)
	}
	return ioFetch, ioCommitAndFetch
}

// commandTime bounds commands that wait for nobody.
const commandTime = 10 * time.Second

// request is what goes with a control command.
type request struct {
	id    uint32 // of the device
	buf   []byte // a page, see newPage; nil: none
	n     int    // bytes of it
	data  uint64
	limit time.Duration
}

// errLate: the driver has not answered. It may still do, and write to the page.
var errLate = fmt.Errorf("the ublk driver has not answered in time: %w", blk.ETIMEDOUT)

// send sends one command and waits for its answer, at most for r.limit. Each has
// an io_uring of its own, so that one that hangs hinders nobody.
func (c *control) send(cmd uint32, r request) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ring, err := uring.NewRing(2, uring.Options{SQE128: true})
	if err != nil {
		return err
	}
	defer ring.Close()
	s := ring.Next()
	if c.encoded {
		cmd = encoded(cmd)
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
	return await(ring, r.limit)
}

// await waits for the one completion of ring.
func await(ring *uring.Ring, limit time.Duration) error {
	const look = 20 * time.Millisecond // also where no wake-up comes
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

// newPage is memory for a command's buffer, outside of the heap: a late driver
// must not write to memory that has become something else.
func newPage() ([]byte, error) {
	return unix.Mmap(-1, 0, int(pageSize), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
}

// freePage gives it back, unless its command ended late.
func freePage(page []byte, err error) {
	if !errors.Is(err, errLate) {
		unix.Munmap(page)
	}
}

// withPage runs a command whose buffer is filled by put and read by get.
func (c *control) withPage(cmd uint32, r request, put, get func([]byte)) (err error) {
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

// add makes a device; info comes back as the driver has changed it.
func (c *control) add(info *devInfo) error {
	return c.withPage(cmdAddDev, request{id: info.id, n: devInfoSize}, info.put, info.get)
}

func (c *control) info(id uint32) (info devInfo, err error) {
	err = c.withPage(cmdGetDevInfo, request{id: id, n: devInfoSize}, nil, info.get)
	return info, err
}

func (c *control) setParams(id uint32, p *params) error {
	return c.withPage(cmdSetParams, request{id: id, n: paramsSize}, p.put, nil)
}

// canResize: the driver changes the size of disks.
func (c *control) canResize() bool { return c.features&featUpdateSize != 0 }

// resize changes the size of a disk that is there. Drivers before Linux 7.0
// crash the kernel if there is none.
func (c *control) resize(id uint32, size uint64) error {
	return c.do(cmdUpdateSize, request{id: id, data: size / blk.SectorSize, limit: commandTime})
}

// size is the device's size in bytes as it was set last.
func (c *control) size(id uint32) (size uint64, err error) {
	put := func(b []byte) { native.PutUint32(b, paramsSize) }
	err = c.withPage(cmdGetParams, request{id: id, n: paramsSize}, put, func(b []byte) { size = sizeIn(b) })
	return size, err
}

// start makes the disk appear. The partition table is read meanwhile.
func (c *control) start(id uint32, limit time.Duration) error {
	return c.do(cmdStartDev, request{id: id, data: uint64(os.Getpid()), limit: limit})
}

// stop makes it disappear, after its last request.
func (c *control) stop(id uint32, limit time.Duration) error {
	return c.do(cmdStopDev, request{id: id, limit: limit})
}

// del forgets the device. It waits for openers of the disk to close it.
func (c *control) del(id uint32, limit time.Duration) error {
	return c.do(cmdDelDev, request{id: id, limit: limit})
}

func (c *control) startRecovery(id uint32) error {
	return c.do(cmdStartUserRecovery, request{id: id, limit: commandTime})
}

func (c *control) endRecovery(id uint32, limit time.Duration) error {
	return c.do(cmdEndUserRecovery, request{id: id, data: uint64(os.Getpid()), limit: limit})
}
