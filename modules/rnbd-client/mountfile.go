package client

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/loopdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/private"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sockpair"
)

// Files of the front end "fuse". Each device has a FUSE mount of its own whose root is one
// file. The daemon mounts it and keeps the descriptor, so users wait while the front end's
// process is restarted. The mount ends with the last descriptor.

const (
	// settingPath is the setting of a device with the path of its file.
	settingPath = "path"
	// mountType is the type of the mounts in the mount table.
	mountType = "fuse.rnbd-device"
	// helperTime bounds a run of fusermount3.
	helperTime = 10 * time.Second
)

// mountedFile is the mount of one device.
type mountedFile struct {
	path    string
	channel *os.File // of /dev/fuse
	helper  bool     // fusermount3 has mounted it
	node    string   // of the loop device on the file; empty: there is none
	disk    bool     // a loop device is or may be on the file
	served  bool     // a process has served it, which may have taken requests
}

// mountDeviceFile mounts a file at dir/name. The folder dir is made if there is none. A
// mount that a dead daemon has left there is removed.
func mountDeviceFile(dir, name string) (*mountedFile, error) {
	folder, err := private.Folder(dir)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	m := &mountedFile{path: filepath.Join(dir, strings.ReplaceAll(name, "/", "!"))}
	if err := m.makeMountPoint(); err != nil {
		return nil, err
	}
	if err := m.mountFile(); err != nil {
		os.Remove(m.path)
		return nil, fmt.Errorf("mount %s: %w", m.path, err)
	}
	return m, nil
}

// makeMountPoint makes an empty file to mount on. An earlier mount may have left such a
// file.
func (m *mountedFile) makeMountPoint() error {
	f, err := os.OpenFile(m.path, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err == nil {
		return f.Close()
	}
	if !errors.Is(err, os.ErrExist) {
		return err
	}
	st, err := os.Lstat(m.path)
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular() || st.Size() != 0:
		return fmt.Errorf("%s exists and is no empty file: %w", m.path, syscall.EEXIST)
	}
	return nil
}

// mountFile mounts the file, by fusermount3 without the right to mount.
func (m *mountedFile) mountFile() error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("there is no /dev/fuse: load the module fuse, or give the container the node: %w", unix.ENODEV)
	}
	if err != nil {
		return fmt.Errorf("open /dev/fuse: %w", err)
	}
	options := fmt.Sprintf("fd=%d,rootmode=100000,user_id=%d,group_id=%d,default_permissions,allow_other", fd, os.Geteuid(), os.Getegid())
	err = unix.Mount(mountSource(), m.path, mountType, unix.MS_NOSUID|unix.MS_NODEV, options)
	if errors.Is(err, unix.EPERM) && os.Geteuid() != 0 {
		unix.Close(fd)
		m.helper = true
		m.channel, err = mountByHelper(m.path)
		return err
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	m.channel = os.NewFile(uintptr(fd), m.path)
	return nil
}

// mountByHelper mounts by fusermount3. The program passes the descriptor of /dev/fuse
// through the socket of descriptor 3.
func mountByHelper(path string) (*os.File, error) {
	conn, theirs, err := sockpair.New(unix.SOCK_STREAM, "fusermount3")
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	c := exec.Command("fusermount3", "-o", "fsname=rnbd,subtype=rnbd-device,default_permissions", "--", path)
	c.ExtraFiles = []*os.File{theirs}
	c.Env = append(os.Environ(), "_FUSE_COMMFD=3")
	c.WaitDelay = helperTime
	out, err := c.CombinedOutput()
	theirs.Close()
	if err != nil {
		return nil, fmt.Errorf("fusermount3: %w: %s", err, strings.TrimSpace(string(out)))
	}
	conn.SetReadDeadline(time.Now().Add(helperTime))
	var b [1]byte
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := conn.ReadMsgUnix(b[:], oob)
	if err != nil {
		return nil, fmt.Errorf("descriptor of fusermount3: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		return nil, fmt.Errorf("fusermount3 passes no descriptor: %w", syscall.EPROTO)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		return nil, fmt.Errorf("fusermount3 passes no descriptor: %w", syscall.EPROTO)
	}
	unix.CloseOnExec(fds[0])
	return os.NewFile(uintptr(fds[0]), path), nil
}

// unmountFile removes the mount and its mount point. The error wraps EBUSY if the file is in
// use and force is not set. With force, users keep a file without a device: their
// requests fail when the front end and the daemon have closed the descriptor.
func (m *mountedFile) unmountFile(force bool) error {
	flags := unix.UMOUNT_NOFOLLOW
	if force {
		flags |= unix.MNT_DETACH
	}
	err := unix.Unmount(m.path, flags)
	if m.helper {
		err = unmountByHelper(m.path, force)
	}
	if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // unmounted by others
		return fmt.Errorf("unmount %s: %w", m.path, err)
	}
	m.channel.Close()
	os.Remove(m.path)
	return nil
}

func unmountByHelper(path string, force bool) error {
	args := []string{"-u", "--", path}
	if force {
		args = []string{"-u", "-z", "--", path}
	}
	out, err := exec.Command("fusermount3", args...).CombinedOutput()
	if err == nil {
		return nil
	}
	text := strings.TrimSpace(string(out))
	if strings.Contains(text, "busy") {
		return fmt.Errorf("fusermount3: %s: %w", text, syscall.EBUSY)
	}
	return fmt.Errorf("fusermount3: %s: %w", text, err)
}

// mountSource is the source of this process's mounts in the mount table.
func mountSource() string { return fmt.Sprintf("rnbd:%d", os.Getpid()) }

// removeDeadMounts removes the mounts below dir that no process serves, with the loop
// devices on their files. The files answer nothing. Users of a loop device keep it.
func removeDeadMounts(dir string, tool loopdev.Tool) error {
	table, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer table.Close()
	for lines := bufio.NewScanner(table); lines.Scan(); {
		path, source, ok := parseMount(lines.Text())
		if !ok || filepath.Dir(path) != dir || isAlive(source) || !isDead(path) {
			continue
		}
		if len(loopdev.Of(path)) > 0 {
			if err := detachLoops(tool, path); err != nil {
				return fmt.Errorf("loop device on %s of a dead daemon: %w", path, err)
			}
		}
		if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s of a dead daemon: %w", path, err)
		}
		os.Remove(path)
	}
	return nil
}

// detachLoops removes the loop devices of a file whose daemon has ended.
func detachLoops(tool loopdev.Tool, path string) error {
	ctx, cancel := context.WithTimeout(context.Background(), helperTime)
	defer cancel()
	return tool.Detach(ctx, path, true)
}

// parseMount returns path and source of a mount of mountType in a line of
// /proc/self/mountinfo (proc(5)).
func parseMount(line string) (path, source string, ok bool) {
	before, after, ok := strings.Cut(line, " - ")
	fields, kind := strings.Fields(before), strings.Fields(after)
	if !ok || len(fields) < 5 || len(kind) < 2 || kind[0] != mountType {
		return "", "", false
	}
	return unescapeMount(fields[4]), kind[1], true
}

// unescapeMount replaces the octal escapes of a path in the mount table.
func unescapeMount(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
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

// lookTime bounds the wait for a mount's answer. The process that serves it may be just
// being restarted.
const lookTime = time.Second

// isDead reports whether no process has the descriptor of the mount at path any more. A daemon
// hands its mounts over to the next process, so the daemon of its source may have ended.
func isDead(path string) bool {
	answer := make(chan error, 1)
	go func() {
		var st unix.Statfs_t
		answer <- unix.Statfs(path, &st)
	}()
	select {
	case err := <-answer:
		return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED)
	case <-time.After(lookTime):
		return false
	}
}

// isAlive reports whether the daemon of a mount's source runs.
func isAlive(source string) bool {
	pid, err := strconv.Atoi(strings.TrimPrefix(source, "rnbd:"))
	return err == nil && pid > 0 && unix.Kill(pid, 0) != unix.ESRCH
}
