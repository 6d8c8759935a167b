package private

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestFolder(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	mode := func(name string, m os.FileMode) string {
		path := filepath.Join(dir, name)
		must(t, os.Mkdir(path, 0o700))
		must(t, os.Chmod(path, m))
		return path
	}
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Symlink(dir, link))
	for _, x := range []struct {
		name, path string
		want       error
	}{
		{"a new folder", filepath.Join(dir, "a", "b"), nil},
		{"a folder that others may read", mode("readable", 0o755), nil},
		{"a folder that everybody may write", mode("writable", 0o777), syscall.EPERM},
		{"a folder that the group may write", mode("group", 0o770), nil},
		{"a folder like /tmp", mode("sticky", 0o777|os.ModeSticky), nil},
		{"a link to a folder", link, syscall.ENOTDIR},
		{"a file", file, syscall.ENOTDIR},
	} {
		f, err := Folder(x.path)
		if !errors.Is(err, x.want) || (err == nil) != (x.want == nil) {
			t.Errorf("%s: %v, want %v", x.name, err, x.want)
		}
		if err == nil {
			f.Close()
		}
	}
	if st, err := os.Stat(filepath.Join(dir, "a", "b")); err != nil || st.Mode().Perm() != 0o700 {
		t.Errorf("a new folder has mode %v, %v", st.Mode(), err)
	}
	if _, err := Look(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder that is not there: %v", err)
	}
}

// A folder that another user has made beforehand is refused.
func TestFolder_OfAnotherUser(t *testing.T) {
	f, err := Folder(filepath.Join(t.TempDir(), "rnbd-1000"))
	must(t, err)
	defer f.Close()
	owner := os.Geteuid()
	if owner == 0 {
		owner = 1000
		must(t, os.Chown(f.Name(), owner, owner))
	}
	if err := checkFolder(f, owner); err != nil {
		t.Errorf("its owner: %v", err)
	}
	if err := checkFolder(f, owner+1); !errors.Is(err, syscall.EPERM) {
		t.Errorf("another user: %v, want EPERM", err)
	}
}

// Neither reads nor writes follow a link.
func TestFile_Links(t *testing.T) {
	dir := t.TempDir()
	name, other := filepath.Join(dir, "state"), filepath.Join(dir, "other")
	must(t, os.WriteFile(other, []byte("other"), 0o644))
	must(t, os.Symlink(other, name))
	if b, err := Read(name); !errors.Is(err, syscall.ELOOP) {
		t.Errorf("read %q, %v, want ELOOP", b, err)
	}
	must(t, os.Symlink(other, name+".new"))
	must(t, Replace(name, []byte("state")))
	if b, err := os.ReadFile(other); string(b) != "other" {
		t.Errorf("the file that the link led to is %q, %v", b, err)
	}
	if b, err := Read(name); string(b) != "state" {
		t.Errorf("read %q, %v", b, err)
	}
	if st, err := os.Lstat(name); err != nil || st.Mode() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
}

func TestFile_Missing(t *testing.T) {
	name := filepath.Join(t.TempDir(), "new", "state")
	if _, err := Read(name); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("read: %v", err)
	}
	if err := Remove(name); err != nil {
		t.Errorf("remove: %v", err)
	}
	must(t, Replace(name, nil))
	must(t, Remove(name))
	if err := Remove(name); err != nil {
		t.Errorf("remove again: %v", err)
	}
}

func TestFile_OfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file away")
	}
	name := filepath.Join(t.TempDir(), "state")
	must(t, Replace(name, nil))
	must(t, os.Chown(name, 1000, 1000))
	if _, err := Read(name); !errors.Is(err, syscall.EPERM) {
		t.Errorf("read: %v, want EPERM", err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestReplace_FullDisk runs itself as a process that may write files of 16 bytes.
func TestReplace_FullDisk(t *testing.T) {
	if name := os.Getenv("PRIVATE_TEST_FILE"); name != "" {
		limit := unix.Rlimit{Cur: 16, Max: 16}
		must(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &limit))
		if err := Replace(name, make([]byte, 17)); !errors.Is(err, syscall.EFBIG) {
			t.Errorf("17 bytes: %v", err)
		}
		return
	}
	name := filepath.Join(t.TempDir(), "state")
	must(t, Replace(name, []byte("old")))
	cmd := exec.Command(os.Args[0], "-test.run=TestReplace_FullDisk$")
	cmd.Env = append(os.Environ(), "PRIVATE_TEST_FILE="+name)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if b, err := Read(name); err != nil || string(b) != "old" {
		t.Errorf("the file has %q, %v", b, err)
	}
	if left, _ := filepath.Glob(name + ".*"); len(left) > 0 {
		t.Errorf("half a file is left: %q", left)
	}
	must(t, os.WriteFile(name+".new", []byte("of a process that was killed"), 0o600))
	must(t, Replace(name, []byte("new")))
	if b, err := Read(name); err != nil || string(b) != "new" {
		t.Errorf("then %q, %v", b, err)
	}
}
