// DATA PATH: receive reads the socket and hands frames to the bond; Send writes
// one. In front of each frame is the header of virtio-net (10 octets). It names
// the checksum that is still to be filled in.

package ether

import (
	"encoding/binary"
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/bond/dev"
)

const (
	vnetHeader = 10
	needsCsum  = 1 // flag: a checksum is to be filled in
)

var emptyHeader [vnetHeader]byte

// receiveLoop runs until the socket is closed. An interface that is down is an
// error of every read; it is waited for.
func (d *Device) receiveLoop() {
	defer close(d.done)
	buf := make([]byte, vnetHeader+14+64<<10)
	for {
		n, err := d.socket.Read(buf)
		switch {
		case errors.Is(err, os.ErrClosed):
			return
		case err != nil:
			time.Sleep(time.Millisecond) // ENETDOWN comes once; others may come again
		case n >= vnetHeader && dev.RxFilter(d.filter.Load()) != dev.RxNone:
			if c := d.calls.Load(); c != nil {
				f := buf[vnetHeader:n]
				finishChecksum(buf[:vnetHeader], f)
				c.Received(f)
			}
		}
	}
}

// Send implements dev.Slave. ENOBUFS and EAGAIN are a full queue: the frame is lost.
func (d *Device) Send(f []byte) error {
	_, err := unix.Writev(d.fd, [][]byte{emptyHeader[:], f})
	return err
}

// finishChecksum fills in the checksum that the header h asks for: the sum of the octets from
// start to the end of f, with the present octets of the checksum's place included.
func finishChecksum(h, f []byte) {
	if h[0]&needsCsum == 0 {
		return
	}
	start := int(binary.NativeEndian.Uint16(h[6:]))
	at := start + int(binary.NativeEndian.Uint16(h[8:]))
	if at+2 > len(f) {
		return
	}
	var sum uint32
	for b := f[start:]; len(b) > 0; b = b[2:] {
		if len(b) == 1 {
			sum += uint32(b[0]) << 8
			break
		}
		sum += uint32(b[0])<<8 | uint32(b[1])
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	c := ^uint16(sum)
	if c == 0 { // of UDP, where zero means none
		c = 0xffff
	}
	binary.BigEndian.PutUint16(f[at:], c)
}
