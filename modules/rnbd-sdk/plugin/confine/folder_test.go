package confine

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCheckFolder(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it gives files to other users")
	}
	const other = 12345
	root := t.TempDir()
	self := func() trust {
		return trust{users: map[uint32]bool{0: true}, groups: map[uint32]bool{0: true}, above: "/usr/bin/rnbd"}
	}
	for _, c := range []struct {
		name  string
		upper fs.FileMode // of the folder above
		dir   fs.FileMode
		file  fs.FileMode
		owner func(upper, dir, file string) error
		trust func(*trust)
		bad   string // in the error: the file's name, or a folder's
	}{
		{name: "root's", upper: 0o755, dir: 0o755, file: 0o755},
		{name: "group root may write", upper: 0o775, dir: 0o775, file: 0o775},
		{name: "sticky folder", upper: 0o755, dir: 0o777 | fs.ModeSticky, file: 0o755},
		{name: "sticky folder above", upper: 0o777 | fs.ModeSticky, dir: 0o755, file: 0o755},
		{name: "file of everybody", upper: 0o755, dir: 0o755, file: 0o777, bad: "plugin "},
		{name: "sticky file of everybody", upper: 0o755, dir: 0o755, file: 0o777 | fs.ModeSticky, bad: "plugin "},
		{name: "folder of everybody", upper: 0o755, dir: 0o777, file: 0o755, bad: "dir "},
		{name: "folder above of everybody", upper: 0o777, dir: 0o755, file: 0o755, bad: "upper "},
		{name: "folder of another group", upper: 0o755, dir: 0o775, file: 0o755, bad: "dir ",
			owner: func(_, dir, _ string) error { return os.Chown(dir, 0, other) }},
		{name: "folder above of another group", upper: 0o775, dir: 0o755, file: 0o755, bad: "upper ",
			owner: func(upper, _, _ string) error { return os.Chown(upper, 0, other) }},
		{name: "another group may read", upper: 0o755, dir: 0o755, file: 0o755,
			owner: func(_, dir, file string) error {
				return errors.Join(os.Chown(dir, 0, other), os.Chown(file, 0, other))
			}},
		{name: "folder of another user", upper: 0o755, dir: 0o755, file: 0o755, bad: "dir ",
			owner: func(_, dir, _ string) error { return os.Chown(dir, other, 0) }},
		{name: "file of another user", upper: 0o755, dir: 0o755, file: 0o755, bad: "plugin ",
			owner: func(_, _, file string) error { return os.Chown(file, other, 0) }},
		{name: "of the user that owns the host's program", upper: 0o755, dir: 0o755, file: 0o755,
			owner: func(_, dir, file string) error {
				return errors.Join(os.Chown(dir, other, 0), os.Chown(file, other, 0))
			}, trust: func(tr *trust) { tr.users[other] = true }},
		{name: "the host's program is below the folder of everybody too", upper: 0o777, dir: 0o755, file: 0o755,
			trust: func(tr *trust) { tr.above = filepath.Join(root, "upper", "bin", "rnbd") }},
	} {
		t.Run(c.name, func(t *testing.T) {
			upper := filepath.Join(root, "upper")
			dir := filepath.Join(upper, "dir")
			file := filepath.Join(dir, "plugin")
			link := filepath.Join(root, "link")
			defer os.RemoveAll(upper)
			defer os.Remove(link)
			err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(file, nil, 0o755), os.Symlink(file, link))
			if c.owner != nil {
				err = errors.Join(err, c.owner(upper, dir, file))
			}
			err = errors.Join(err, os.Chmod(file, c.file), os.Chmod(dir, c.dir), os.Chmod(upper, c.upper))
			if err != nil {
				t.Fatal(err)
			}
			tr := self()
			if c.trust != nil {
				c.trust(&tr)
			}
			for _, path := range []string{file, link} {
				err = checkFolder(path, tr)
				if c.bad == "" && err != nil {
					t.Errorf("%s: %v", path, err)
				}
				if c.bad != "" && (!errors.Is(err, fs.ErrPermission) || !strings.Contains(err.Error(), "/"+c.bad)) {
					t.Errorf("%s: %v", path, err)
				}
			}
		})
	}
}

func TestCheckFolderOfOwnProgram(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := CheckFolder(exe); err != nil {
		t.Error(err)
	}
}
