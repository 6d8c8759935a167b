package confine

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Access rights of landlock, by the version of its ABI that brought them.
const (
	fsFirst = unix.LANDLOCK_ACCESS_FS_MAKE_SYM<<1 - 1 // ABI 1: from EXECUTE to MAKE_SYM

	readRights  = unix.LANDLOCK_ACCESS_FS_READ_FILE | unix.LANDLOCK_ACCESS_FS_READ_DIR
	writeRights = readRights | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE |
		unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	runRights = readRights | unix.LANDLOCK_ACCESS_FS_EXECUTE
	// fileRights are those that a rule for a file, not a folder, may have.
	fileRights = unix.LANDLOCK_ACCESS_FS_EXECUTE | unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_READ_FILE |
		unix.LANDLOCK_ACCESS_FS_TRUNCATE | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
)

// bestABI is the newest version with rights that are used here.
const bestABI = 6

// LandlockABI returns the version that the kernel has.
func LandlockABI() (int, error) {
	n, _, errno := unix.Syscall(unix.SYS_LANDLOCK_CREATE_RULESET, 0, 0, unix.LANDLOCK_CREATE_RULESET_VERSION)
	switch errno {
	case 0:
		return int(n), nil
	case unix.EOPNOTSUPP:
		return 0, errors.New("the kernel has landlock, but it is not enabled at boot (lsm=)")
	}
	return 0, errors.New("the kernel has no landlock")
}

// handled returns the accesses that a domain of an ABI refuses unless a rule allows them.
func handled(abi int, network bool) unix.LandlockRulesetAttr {
	a := unix.LandlockRulesetAttr{Handled_access_fs: fsFirst}
	if abi >= 2 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_REFER
	}
	if abi >= 3 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_TRUNCATE
	}
	if abi >= 4 && !network {
		a.Handled_access_net = unix.LANDLOCK_ACCESS_NET_BIND_TCP | unix.LANDLOCK_ACCESS_NET_CONNECT_TCP
	}
	if abi >= 5 {
		a.Handled_access_fs |= unix.LANDLOCK_ACCESS_FS_IOCTL_DEV
	}
	if abi >= 6 {
		a.Scoped = unix.LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | unix.LANDLOCK_SCOPE_SIGNAL
	}
	return a
}

// rights returns a rule's rights among those that are handled.
func (a Access) rights(handled uint64) uint64 {
	switch a {
	case Read:
		return readRights & handled
	case Write:
		return writeRights & handled
	case Run:
		return runRights & handled
	}
	return handled &^ unix.LANDLOCK_ACCESS_FS_EXECUTE
}

// openRule is a rule with the descriptor of its path.
type openRule struct {
	fd     int
	access Access
}

// openRules opens the paths while the process may still do that. The error is that
// of required paths.
func openRules(rules []Rule) (out []openRule, err error) {
	for _, r := range rules {
		fd, oerr := unix.Open(r.Path, unix.O_PATH|unix.O_CLOEXEC, 0)
		switch {
		case oerr == nil:
			out = append(out, openRule{fd, r.Access})
		case r.Required:
			err = errors.Join(err, &os.PathError{Op: "open", Path: r.Path, Err: oerr})
		}
	}
	return out, err
}

// restrictFiles puts the thread into a domain of the rules. no_new_privs is set.
func restrictFiles(abi int, rules []openRule, network bool) error {
	attr := handled(abi, network)
	set, err := createRuleset(&attr)
	if err != nil {
		return fmt.Errorf("make a set of rules: %w", err)
	}
	defer unix.Close(set)
	for _, r := range rules {
		var st unix.Stat_t
		if err := unix.Fstat(r.fd, &st); err != nil {
			return err
		}
		rights := r.access.rights(attr.Handled_access_fs)
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			rights &= fileRights
		}
		if err := addPath(set, r.fd, rights); err != nil {
			return fmt.Errorf("add a rule: %w", err)
		}
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_LANDLOCK_RESTRICT_SELF, uintptr(set), 0, 0); errno != 0 {
		return fmt.Errorf("enter the domain: %w", errno)
	}
	return nil
}
