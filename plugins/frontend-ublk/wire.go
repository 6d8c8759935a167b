package main

import (
	"encoding/binary"
	"fmt"
)

// The driver's interface: include/uapi/linux/ublk_cmd.h. Its licence has an
// exception ("WITH Linux-syscall-note"). Structures are in host order.

// Control commands, by number. Since Linux 6.4 they are sent in the encoding of
// ioctl numbers; before, as they are.
const (
	cmdGetDevInfo        = 0x02
	cmdAddDev            = 0x04
	cmdDelDev            = 0x05
	cmdStartDev          = 0x06
	cmdStopDev           = 0x07
	cmdSetParams         = 0x08
	cmdGetParams         = 0x09
	cmdStartUserRecovery = 0x10
	cmdEndUserRecovery   = 0x11
	cmdGetFeatures       = 0x13 // encoded only
	cmdUpdateSize        = 0x15 // Linux 6.16
)

// I/O commands.
const (
	ioFetch          = 0x20
	ioCommitAndFetch = 0x21
)

// resAbort completes a fetch when the device ends.
const resAbort = -19 // ENODEV

// Features of a device.
const (
	featZeroCopy            = 1 << 0
	featUserRecovery        = 1 << 3
	featUserRecoveryReissue = 1 << 4
	featIoctlEncode         = 1 << 6
	featUpdateSize          = 1 << 10
	featAutoBufReg          = 1 << 11 // Linux 6.16
)

// States of a device.
const (
	stateDead     = 0
	stateLive     = 1
	stateQuiesced = 2 // its server has died; requests wait
)

var stateNames = map[uint16]string{stateDead: "dead", stateLive: "live", stateQuiesced: "quiesced"}

func stateName(s uint16) string {
	if n := stateNames[s]; n != "" {
		return n
	}
	return fmt.Sprintf("state %d", s)
}

const (
	maxQueueDepth = 4096
	anyDevice     = ^uint32(0) // the driver chooses a number
	noQueue       = ^uint16(0)
)

// Operations and flags of a request.
const (
	opRead        = 0
	opWrite       = 1
	opFlush       = 2
	opDiscard     = 3
	opWriteZeroes = 5

	opMask      = 0xff
	flagFUA     = 1 << 13
	flagNoUnmap = 1 << 15
)

var native = binary.NativeEndian

const (
	ctrlCmdSize = 32
	ioCmdSize   = 16
	devInfoSize = 64
	ioDescSize  = 24
)

// Ioctl encoding: direction, size, type 'u', number.
const (
	ioctlWrite = 1
	ioctlRead  = 2
)

func ioctlNumber(dir, nr, size uint32) uint32 { return dir<<30 | size<<16 | 'u'<<8 | nr }

// encodedCommand returns a control command as an ioctl number.
func encodedCommand(nr uint32) uint32 {
	switch nr {
	case cmdGetDevInfo, cmdGetParams, cmdGetFeatures:
		return ioctlNumber(ioctlRead, nr, ctrlCmdSize)
	}
	return ioctlNumber(ioctlRead|ioctlWrite, nr, ctrlCmdSize)
}

// ioEncoded returns an I/O command as an ioctl number.
func ioEncoded(nr uint32) uint32 { return ioctlNumber(ioctlRead|ioctlWrite, nr, ioCmdSize) }

// putCtrl fills the payload of a control command: struct ublksrv_ctrl_cmd.
func putCtrl(b []byte, id uint32, addr uint64, n int, data uint64) {
	clear(b[:ctrlCmdSize])
	native.PutUint32(b[0:], id)
	native.PutUint16(b[4:], noQueue)
	native.PutUint16(b[6:], uint16(n))
	native.PutUint64(b[8:], addr)
	native.PutUint64(b[16:], data)
}

// putIO fills the payload of an I/O command: struct ublksrv_io_cmd.
func putIO(b []byte, queue, tag uint16, result int32, addr uint64) {
	native.PutUint16(b[0:], queue)
	native.PutUint16(b[2:], tag)
	native.PutUint32(b[4:], uint32(result))
	native.PutUint64(b[8:], addr)
}

// autoBufReg returns struct ublk_auto_buf_reg, in place of the address of an
// I/O command: the index in the ring's buffer table for the pages of the
// request.
func autoBufReg(index uint16) uint64 { return uint64(index) }

// devInfo is struct ublksrv_ctrl_dev_info.
type devInfo struct {
	queues  uint16
	depth   uint16
	state   uint16
	maxIO   uint32 // bytes
	id      uint32
	pid     int32
	flags   uint64
	private uint64 // the token; the driver keeps it
}

func (d *devInfo) encodeInto(b []byte) {
	clear(b[:devInfoSize])
	native.PutUint16(b[0:], d.queues)
	native.PutUint16(b[2:], d.depth)
	native.PutUint32(b[8:], d.maxIO)
	native.PutUint32(b[12:], d.id)
	native.PutUint32(b[16:], uint32(d.pid))
	native.PutUint64(b[24:], d.flags)
	native.PutUint64(b[32:], d.private)
}

func (d *devInfo) decodeFrom(b []byte) {
	*d = devInfo{
		queues: native.Uint16(b[0:]), depth: native.Uint16(b[2:]), state: native.Uint16(b[4:]),
		maxIO: native.Uint32(b[8:]), id: native.Uint32(b[12:]), pid: int32(native.Uint32(b[16:])),
		flags: native.Uint64(b[24:]), private: native.Uint64(b[32:]),
	}
}

// ioDesc is a view of struct ublksrv_io_desc: one request, written by the
// driver before its fetch completes.
type ioDesc []byte

func (d ioDesc) opFlags() uint32     { return native.Uint32(d[0:]) }
func (d ioDesc) sectorCount() uint32 { return native.Uint32(d[4:]) }
func (d ioDesc) startSector() uint64 { return native.Uint64(d[8:]) }

// descOffset returns the offset, for mmap of the character device, of the
// descriptors of a hardware queue: they are laid out for the greatest depth.
func descOffset(queue int) int64 {
	const stride = maxQueueDepth * ioDescSize
	return int64(queue) * roundUp(stride, pageSize)
}

// descSize returns the bytes to map for a hardware queue.
func descSize(depth int) int { return int(roundUp(int64(depth)*ioDescSize, pageSize)) }

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
