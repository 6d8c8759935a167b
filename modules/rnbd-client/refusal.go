package client

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// refusal returns the error of an OPEN that failed with err. The server answers
// with an errno alone (docs/protocol/rnbd.md, "OPEN"); refusal adds its meaning
// for this device. Other errors, such as that of a lost session, keep their
// text.
func (d *Device) refusal(err error) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return fmt.Errorf("open %q on the server: %w", d.path, err)
	}
	server := d.session.server()
	switch errno {
	case syscall.ENOENT:
		return fmt.Errorf("server %s exports no %q: %w", server, d.path, errno)
	case syscall.ENOTBLK:
		return fmt.Errorf("server %s does not export %q: it is a folder, a FIFO or a character device, or a regular file and the server has no --search-path: %w", server, d.path, errno)
	case syscall.EPERM, syscall.EACCES:
		return fmt.Errorf("server %s does not open %q as %s: %s: %w", server, d.path, d.mode, d.forbidden(errno), errno)
	case syscall.EBUSY:
		return fmt.Errorf("server %s does not open %q: another program of that host has it, or another OPEN of it has not ended: %w", server, d.path, errno)
	case syscall.EINVAL:
		return fmt.Errorf("server %s refuses %q: %s: %w", server, d.path, d.invalid(), errno)
	}
	return fmt.Errorf("open %q on server %s: %w", d.path, server, err)
}

// invalid returns the possible reasons for an EINVAL of a server.
func (d *Device) invalid() string {
	switch {
	case strings.Contains(d.path, ".."):
		return `".." is not allowed in names`
	case d.ioMode != "":
		return fmt.Sprintf("it offers no io mode %q to clients", d.ioMode)
	}
	return "the name or the access mode is not valid there"
}

// forbidden returns the possible reasons for an EPERM or EACCES of a server.
func (d *Device) forbidden(errno syscall.Errno) string {
	switch {
	case errno == syscall.EACCES:
		return "its access rules do not allow it, or the server's user has no permission for it"
	case d.ioMode != "":
		return fmt.Sprintf("its rules say another io mode than %q, or another client may write to it", d.ioMode)
	case d.mode == blk.ReadOnly:
		return "the server's user has no permission for it"
	}
	return "another client may write to it already"
}
