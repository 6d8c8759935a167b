package ctltree

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// mounted is a line of the mount table.
type mounted struct{ fstype, source string }

// mountsAt returns the mounts at path in the table (proc(5), mountinfo), the
// topmost last.
func mountsAt(table io.Reader, path string) (out []mounted, err error) {
	text, err := io.ReadAll(table)
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(text) {
		before, after, ok := strings.Cut(string(line), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if ok && len(left) >= 5 && len(right) >= 2 && unescape(left[4]) == path {
			out = append(out, mounted{fstype: right[0], source: unescape(right[1])})
		}
	}
	return out, nil
}

// unescape undoes \ooo.
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+4 <= len(s) {
			if c, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(c))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// clearStale removes the mounts of dead daemons at path. EBUSY: a living daemon
// has one there.
func clearStale(path string) error {
	for {
		table, err := os.Open("/proc/self/mountinfo")
		if err != nil {
			return err
		}
		here, err := mountsAt(table, path)
		table.Close()
		if err != nil || len(here) == 0 {
			return err
		}
		top := here[len(here)-1]
		if !strings.HasPrefix(top.fstype, "fuse") || !gone(path) {
			return fmt.Errorf("%s is mounted there already (type %s): %w", top.source, top.fstype, syscall.EBUSY)
		}
		if err := detach(path); err != nil {
			return fmt.Errorf("mount of a daemon that is gone: %w", err)
		}
	}
}

// statPatience bounds the look at a mount, since its daemon may hang.
const statPatience = 2 * time.Second

// gone reports whether the process that served the FUSE mount at path has ended.
func gone(path string) bool {
	result := make(chan error, 1)
	go func() {
		var st unix.Statfs_t
		result <- unix.Statfs(path, &st)
	}()
	select {
	case err := <-result:
		return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED)
	case <-time.After(statPatience):
		return false
	}
}

// detach unmounts path now; open files stay open.
func detach(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if err != unix.EPERM {
		return os.NewSyscallError("unmount "+path, err)
	}
	out, err := exec.Command("fusermount3", "-u", "-z", path).CombinedOutput()
	if err != nil {
		return fmt.Errorf("unmount %s: fusermount3: %w: %s", path, err, bytes.TrimSpace(out))
	}
	return nil
}
