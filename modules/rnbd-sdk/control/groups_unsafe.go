package control

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxGroups is more groups than Linux gives a process, NGROUPS_MAX.
const maxGroups = 1 << 16

// peerGroups returns the supplementary groups of the process at the other end of a
// unix socket, as it had them when it connected.
func peerGroups(fd int) (ids []int, err error) {
	for room := 64; room <= 2*maxGroups; room *= 4 {
		list := make([]uint32, room)
		size := uint32(4 * room)
		_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_PEERGROUPS,
			uintptr(unsafe.Pointer(&list[0])), uintptr(unsafe.Pointer(&size)), 0)
		if errno == unix.ERANGE {
			continue
		}
		if errno == unix.ENOPROTOOPT { // before Linux 4.13
			return nil, nil
		}
		if errno != 0 {
			return nil, errno
		}
		for _, id := range list[:size/4] {
			ids = append(ids, int(id))
		}
		return ids, nil
	}
	return nil, syscall.ERANGE
}
