package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
)

// The driver's interface, as far as one disk with one hardware queue needs it:
// include/uapi/linux/ublk_cmd.h. Commands are numbers of ioctls, Linux 6.4 and later.
const (
	addDevice   = 3<<30 | 32<<16 | 'u'<<8 | 0x04
	delDevice   = 2<<30 | 32<<16 | 'u'<<8 | 0x14 // without a wait for openers: Linux 6.9 and later
	startDevice = 3<<30 | 32<<16 | 'u'<<8 | 0x06
	setParams   = 3<<30 | 32<<16 | 'u'<<8 | 0x08
	fetch       = 3<<30 | 16<<16 | 'u'<<8 | 0x20
	fetchAgain  = 3<<30 | 16<<16 | 'u'<<8 | 0x21

	ioctlEncoded = 1 << 6 // of the flags of a device

	descriptor  = 24 // bytes of a request's descriptor
	blockShift  = 9
	nodeTime    = 10 * time.Second
	infoBytes   = 64
	paramsBytes = 60
)

var native = binary.NativeEndian

// scratch is the buffer of a command to the driver, which knows it by its address: a
// stack may move.
var scratch [infoBytes]byte

// ublk is the front end of a disk of the kernel's ublk driver, one source of its pump:
// what the driver has filled becomes an entry of the ring, an answer commits it and
// fetches the next.
type ublk struct {
	config
	sub    *shm.Submitter
	arena  uint64 // address
	drv    *uring.Ring
	event  int // the driver's eventfd
	char   int32
	desc   []byte
	cqes   [256]shm.CQE
	events [256]uring.CQE
	token  [8]byte
}

// runUblk serves the disk, and prints the path of its node when it is there.
func runUblk(c config) error {
	o, err := open()
	if err != nil {
		return err
	}
	u := &ublk{config: c, sub: o.ring.Submitter(), arena: uring.Address(o.arena)}
	if err := u.prepare(); err != nil {
		return err
	}
	if u.drv, err = uring.NewRing(2*extents, uring.Options{CQEntries: 4 * extents}); err != nil {
		return err
	}
	if u.event, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err == nil {
		err = u.drv.RegisterEventfd(u.event)
	}
	if err != nil {
		return err
	}
	p, err := c.newPump("frontend")
	if err != nil {
		return err
	}
	p.Do(func() {
		for tag := range extents {
			u.command(fetch, tag, -1)
		}
		go u.start()
	})
	return serve(p, u, &ublkBell{u})
}

// addUblk adds a device and returns its number. It outlives its server until it is deleted.
func (c config) addUblk() (number uint32, err error) {
	info := scratch[:]
	native.PutUint16(info[0:], 1)
	native.PutUint16(info[2:], extents)
	native.PutUint32(info[8:], uint32(c.piece))
	native.PutUint32(info[12:], ^uint32(0)) // the driver chooses a number
	native.PutUint32(info[16:], uint32(os.Getpid()))
	native.PutUint64(info[24:], ioctlEncoded)
	if err := control(addDevice, ^uint32(0), info, 0); err != nil {
		return 0, fmt.Errorf("add a ublk device: %w", err)
	}
	return native.Uint32(info[12:]), nil
}

// delUblk deletes the device, when nobody has it open any more.
func delUblk(number uint32) {
	if err := control(delDevice, number, nil, 0); err != nil {
		fmt.Fprintf(os.Stderr, "floor: /dev/ublkc%d is left behind: %v\n", number, err)
	}
}

// prepare sets the device up and opens it.
func (u *ublk) prepare() error {
	params := scratch[:paramsBytes]
	clear(params)
	native.PutUint32(params[0:], paramsBytes)
	native.PutUint32(params[4:], 1) // basic ones
	basic := params[8:]
	for i := range 4 { // blocks: logical, physical, best and least I/O
		basic[4+i] = blockShift
	}
	native.PutUint32(basic[8:], uint32(u.piece>>blockShift))
	native.PutUint64(basic[16:], uint64(u.size>>blockShift))
	if err := control(setParams, uint32(u.number), params, 0); err != nil {
		return fmt.Errorf("parameters of a ublk device: %w", err)
	}
	return u.open()
}

// open opens the character device and maps its descriptors.
func (u *ublk) open() error {
	path := fmt.Sprintf("/dev/ublkc%d", u.number)
	for end := time.Now().Add(nodeTime); ; time.Sleep(10 * time.Millisecond) {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil {
			u.char = int32(fd)
			break
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	size := (extents*descriptor + os.Getpagesize() - 1) &^ (os.Getpagesize() - 1)
	desc, err := unix.Mmap(int(u.char), 0, size, unix.PROT_READ, unix.MAP_SHARED|unix.MAP_POPULATE)
	u.desc = desc
	return err
}

// start makes the disk appear. Its first requests come before this ends.
func (u *ublk) start() {
	if err := control(startDevice, uint32(u.number), nil, uint64(os.Getpid())); err != nil {
		fail("start a ublk device", err)
	}
	fmt.Printf("/dev/ublkb%d\n", u.number)
}

// control sends a command to the driver and waits for its answer. buf is nil or scratch.
func control(cmd, number uint32, buf []byte, data uint64) error {
	runtime.LockOSThread() // whoever sends a command of io_uring completes it
	defer runtime.UnlockOSThread()
	fd, err := unix.Open("/dev/ublk-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	ring, err := uring.NewRing(2, uring.Options{SQE128: true})
	if err != nil {
		return err
	}
	defer ring.Close()
	s := ring.Next()
	s.URingCmd(int32(fd), cmd)
	b := ring.Cmd(s)
	native.PutUint32(b[0:], number)
	native.PutUint16(b[4:], ^uint16(0)) // no queue
	native.PutUint16(b[6:], uint16(len(buf)))
	if len(buf) > 0 {
		native.PutUint64(b[8:], uring.Address(buf))
	}
	native.PutUint64(b[16:], data)
	if err := ring.Submit(); err != nil {
		return err
	}
	var done [1]uring.CQE
	for ring.Peek(done[:]) == 0 {
		look := [1]unix.PollFd{{Fd: int32(ring.FD()), Events: unix.POLLIN}}
		unix.Poll(look[:], 20) // milliseconds, in case no wake-up comes
		ring.Run()             // fails as the command does
	}
	if done[0].Res < 0 {
		return syscall.Errno(-done[0].Res)
	}
	return nil
}

// command gives a tag to the driver, with its extent of the arena.
func (u *ublk) command(op uint32, tag int, result int32) {
	s := u.drv.Next()
	if s == nil {
		fail("the ring of the driver is full", nil)
	}
	s.URingCmd(u.char, op)
	s.UserData = uint64(tag)
	b := u.drv.Cmd(s)
	native.PutUint16(b[0:], 0)
	native.PutUint16(b[2:], uint16(tag))
	native.PutUint32(b[4:], uint32(result))
	native.PutUint64(b[8:], u.arena+uint64(tag*extent))
}

// Poll commits answers and hands requests on.
func (u *ublk) Poll() int {
	n := u.sub.Pop(u.cqes[:])
	for _, a := range u.cqes[:n] {
		tag := int(a.Tag) / extentTags
		u.command(fetchAgain, tag, int32(native.Uint32(u.desc[tag*descriptor+4:])<<blockShift))
	}
	if u.drv.Pending() > 0 {
		if err := u.drv.Submit(); err != nil && err != unix.EAGAIN && err != unix.EINTR {
			fail("io_uring", err)
		}
	}
	k := u.drv.Peek(u.events[:])
	for _, e := range u.events[:k] {
		if e.Res < 0 {
			fail("the driver refuses a command", unix.Errno(-e.Res))
		}
		u.request(int(e.UserData))
	}
	u.sub.Publish()
	return n + k
}

// request makes an entry of what the driver has written for a tag.
func (u *ublk) request(tag int) {
	d := u.desc[tag*descriptor:][:descriptor]
	e := shm.SQE{Tag: uint64(tag * extentTags), Op: blk.Read, Offset: native.Uint64(d[8:]) << blockShift, ArenaOff: uint64(tag * extent), Len: native.Uint32(d[4:]) << blockShift}
	switch op := d[0]; op {
	case 0:
	case 1:
		e.Op = blk.Write
	default:
		fail(fmt.Sprintf("operation %d of the driver is not served", op), nil)
	}
	if !u.sub.Push(&e) {
		fail("the ring is full", u.sub.Err())
	}
}

func (u *ublk) Arm() bool {
	unix.Read(u.event, u.token[:])
	return u.drv.Arm()
}

func (u *ublk) FD() int { return u.event }

// ublkBell has the pump sleep on the ring to the client, too.
type ublkBell struct{ *ublk }

func (b *ublkBell) Poll() int { return 0 }
func (b *ublkBell) Arm() bool { return b.sub.Arm() }
func (b *ublkBell) Disarm()   { b.sub.Disarm() }
func (b *ublkBell) FD() int   { return b.sub.FD() }

var _ pump.Source = (*ublkBell)(nil)
