package confine

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// CheckFolder refuses, for root, an executable that another user can replace: one
// that others can write to, or that is below a folder that they can write to, or
// that belongs, like its folder, to a user that is not trusted. Root trusts itself
// and those that could replace the host's own program.
func CheckFolder(path string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	return checkFolder(path, own())
}

// trust names the users and groups that may change root's programs.
type trust struct {
	users, groups map[uint32]bool
	above         string // folders of this path are not looked at: the host's own program is there
}

func checkFolder(path string, t trust) error {
	real, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	for p := real; ; p = filepath.Dir(p) {
		isFile, isFolder := p == real, p == filepath.Dir(real)
		if !isFile && !isFolder && t.has(p) {
			return nil
		}
		if err := t.check(p, isFile || isFolder); err != nil {
			return err
		}
		if p == filepath.Dir(p) {
			return nil
		}
	}
}

// has reports whether the host's program is below the folder.
func (t trust) has(folder string) bool {
	return folder == "/" || strings.HasPrefix(t.above, folder+"/")
}

func (t trust) check(p string, owned bool) error {
	st, err := os.Lstat(p)
	if err != nil {
		return err
	}
	sys := st.Sys().(*syscall.Stat_t)
	sticky := st.IsDir() && st.Mode()&fs.ModeSticky != 0
	switch perm := st.Mode().Perm(); {
	case perm&0o002 != 0 && !sticky, perm&0o020 != 0 && !sticky && !t.groups[sys.Gid]:
		return fmt.Errorf("%s can be changed by others (mode %v, group %d), and root does not execute that; chmod go-w it: %w",
			p, perm, sys.Gid, fs.ErrPermission)
	case owned && !t.users[sys.Uid]:
		return fmt.Errorf("%s belongs to user %d, and root does not execute that; chown it to root: %w", p, sys.Uid, fs.ErrPermission)
	}
	return nil
}

// own returns root's trust: in itself, and in the owners of the running program.
func own() trust {
	t := trust{users: map[uint32]bool{0: true}, groups: map[uint32]bool{0: true}}
	t.above, _ = os.Readlink("/proc/self/exe")
	if st, err := os.Stat("/proc/self/exe"); err == nil {
		sys := st.Sys().(*syscall.Stat_t)
		t.users[sys.Uid] = true
		if st.Mode().Perm()&0o020 != 0 {
			t.groups[sys.Gid] = true
		}
	}
	return t
}
