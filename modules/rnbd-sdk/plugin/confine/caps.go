package confine

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// capNames are the capabilities that profiles mention.
var capNames = map[int]string{
	unix.CAP_DAC_OVERRIDE: "dac_override", unix.CAP_DAC_READ_SEARCH: "dac_read_search", unix.CAP_IPC_LOCK: "ipc_lock",
	unix.CAP_NET_ADMIN: "net_admin", unix.CAP_SYS_ADMIN: "sys_admin", unix.CAP_SYS_NICE: "sys_nice",
	unix.CAP_SYS_PTRACE: "sys_ptrace", unix.CAP_SYS_RESOURCE: "sys_resource",
}

// dropBounding removes all but keep from what an exec can give. The error is EPERM
// for a process that may not. It matters only if the process has capabilities.
func dropBounding(keep []int) error {
	for c := 0; c < 64; c++ {
		if slices.Contains(keep, c) {
			continue
		}
		err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0)
		switch {
		case errors.Is(err, unix.EINVAL):
			return nil // one more than the last
		case err != nil:
			return err
		}
	}
	return nil
}

// setCaps reduces the capabilities of the thread to keep, and lets an exec by any
// user keep them. It returns those that are left.
func setCaps(keep []int) (left []int, err error) {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return nil, err
	}
	var want [2]uint32
	for _, c := range keep {
		if data[c/32].Permitted&(1<<(c%32)) != 0 {
			want[c/32] |= 1 << (c % 32)
			left = append(left, c)
		}
	}
	for i := range data {
		data[i] = unix.CapUserData{Effective: want[i], Permitted: want[i], Inheritable: want[i]}
	}
	if err := unix.Capset(&head, &data[0]); err != nil {
		return nil, err
	}
	_ = unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
	for _, c := range left {
		if err := unix.Prctl(unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uintptr(c), 0, 0); err != nil {
			return left, err
		}
	}
	return left, nil
}

// become changes the user of the thread and keeps the permitted capabilities.
func become(u *User) error {
	if err := unix.Prctl(unix.PR_SET_KEEPCAPS, 1, 0, 0, 0); err != nil {
		return err
	}
	if err := setGroups(u.Groups); err != nil {
		return fmt.Errorf("set the groups of %s: %w", u.Name, err)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(u.GID), uintptr(u.GID), uintptr(u.GID)); errno != 0 {
		return fmt.Errorf("set the group of %s: %w", u.Name, errno)
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(u.UID), uintptr(u.UID), uintptr(u.UID)); errno != 0 {
		return fmt.Errorf("set the user %s: %w", u.Name, errno)
	}
	return nil
}

func capList(caps []int) string {
	if len(caps) == 0 {
		return "none left"
	}
	var names []string
	for _, c := range caps {
		names = append(names, capNames[c])
	}
	return "left: " + strings.Join(names, " ")
}
