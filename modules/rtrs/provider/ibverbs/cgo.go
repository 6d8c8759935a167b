//go:build linux && cgo && ibverbs

package ibverbs

/*
#cgo CFLAGS: -O2 -Wall -Wextra -Werror
#cgo LDFLAGS: -ldl -lpthread
#cgo noescape rv_turn
#cgo nocallback rv_turn
#cgo noescape rv_arm
#cgo nocallback rv_arm
#include "lib.h"
*/
import "C"

import (
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Types of the C side. They have aliases because cgo's names are of one file.
type (
	cContext = C.struct_ibv_context
	cPD      = C.struct_ibv_pd
	cMR      = C.struct_ibv_mr
	cQP      = C.struct_ibv_qp
	cID      = C.struct_rdma_cm_id
	cChannel = C.struct_rdma_event_channel
	cCQ      = C.struct_rv_cq
	cWC      = C.struct_rv_wc
	cSend    = C.struct_rv_send
	cRecv    = C.struct_rv_recv
	cWindow  = C.struct_rv_window
	cLoop    = C.struct_rv_loop
)

// errnoOf is the error of a C function that returns 0 or an errno.
func errnoOf(r C.int) error {
	if r == 0 {
		return nil
	}
	return syscall.Errno(r)
}

func addrOf(b []byte) C.uint64_t {
	return C.uint64_t(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}

func bytePointer(b []byte) *C.uint8_t { return (*C.uint8_t)(unsafe.SliceData(b)) }

// toC makes an address for C; the zero Addr has family 0.
func toC(a netip.AddrPort) (c C.struct_rv_addr) {
	addr := a.Addr()
	c.port = C.uint16_t(a.Port())
	switch {
	case verbs.IsGID(addr):
		c.family = unix.AF_IB
	case addr.Unmap().Is4():
		addr = addr.Unmap()
		c.family = unix.AF_INET
	case addr.Is6():
		c.family = unix.AF_INET6
		c.scope = C.uint32_t(scopeOf(addr.Zone()))
	}
	for i, b := range addr.AsSlice() {
		c.ip[i] = C.uint8_t(b)
	}
	return c
}

// scopeOf is the index of the interface that zone names.
func scopeOf(zone string) int {
	if n, err := strconv.Atoi(zone); err == nil {
		return n
	}
	if ifi, err := net.InterfaceByName(zone); err == nil {
		return ifi.Index
	}
	return 0
}

func fromC(c *C.struct_rv_addr) netip.AddrPort {
	var ip [16]byte
	for i := range ip {
		ip[i] = byte(c.ip[i])
	}
	switch c.family {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(ip[:4])), uint16(c.port))
	case unix.AF_INET6:
		addr := netip.AddrFrom16(ip).Unmap()
		if c.scope != 0 && addr.IsLinkLocalUnicast() {
			zone := strconv.Itoa(int(c.scope))
			if ifi, err := net.InterfaceByIndex(int(c.scope)); err == nil {
				zone = ifi.Name
			}
			addr = addr.WithZone(zone)
		}
		return netip.AddrPortFrom(addr, uint16(c.port))
	case unix.AF_IB:
		return netip.AddrPortFrom(verbs.GID(netip.AddrFrom16(ip)), uint16(c.port))
	}
	return netip.AddrPort{}
}
