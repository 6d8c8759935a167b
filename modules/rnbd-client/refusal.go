package client

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// askReason returns the reason of the OPEN that the server has just refused. It is the
// zero value where the server does not tell: a kernel, or an older version.
func (d *Device) askReason(ctx context.Context) (f rnbdwire.ReasonFields) {
	if d.session.features.Load()&rnbdwire.FeatureReasons == 0 || !d.session.transport.Connected() {
		return f
	}
	msg, rsp := make([]byte, rnbdwire.AskReasonSize), make(rnbdwire.Reason, rnbdwire.ReasonSize)
	rnbdwire.PutAskReason(msg, d.path)
	if err := d.session.transport.AdminRead(ctx, msg, rsp); err != nil || !rsp.IsValid() {
		return f
	}
	return rsp.Fields()
}

// refusalError returns the error of an OPEN that failed with err, and that the server has
// refused for why. A server that does not tell its reason has answered with an errno
// alone (docs/extend/protocol/rnbd.md, "OPEN"): refusal adds what the errno may mean for this
// device. Other errors, such as that of a lost session, keep their text.
func (d *Device) refusalError(err error, why rnbdwire.ReasonFields) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return fmt.Errorf("open %q on the server: %w", d.path, err)
	}
	server := d.session.serverAddress()
	if why.Text != "" {
		return fmt.Errorf("server %s does not open %q as %s: %s: %w", server, d.path, d.mode, strings.TrimSuffix(why.Text, ": "+errno.Error()), errno)
	}
	switch errno {
	case syscall.ENOENT:
		return fmt.Errorf("server %s exports no %q: %w", server, d.path, errno)
	case syscall.ENOTBLK:
		return fmt.Errorf("server %s does not export %q: it is a folder, a FIFO or a character device, or a regular file and the server has no --search-path: %w", server, d.path, errno)
	case syscall.EPERM, syscall.EACCES:
		return fmt.Errorf("server %s does not open %q as %s: %s: %w", server, d.path, d.mode, d.forbiddenHint(errno), errno)
	case syscall.EBUSY:
		return fmt.Errorf("server %s does not open %q: another program of that host has it, or another OPEN of it has not ended: %w", server, d.path, errno)
	case syscall.EINVAL:
		return fmt.Errorf("server %s refuses %q: %s: %w", server, d.path, d.invalidHint(), errno)
	}
	return fmt.Errorf("open %q on server %s: %w", d.path, server, err)
}

// invalidHint returns the possible reasons for an EINVAL of a server.
func (d *Device) invalidHint() string {
	switch {
	case strings.Contains(d.path, ".."):
		return `".." is not allowed in names`
	case d.ioMode != "":
		return fmt.Sprintf("it offers no io mode %q to clients", d.ioMode)
	}
	return "the name or the access mode is not valid there"
}

// forbiddenHint returns the possible reasons for an EPERM or EACCES of a server.
func (d *Device) forbiddenHint(errno syscall.Errno) string {
	switch {
	case errno == syscall.EACCES:
		return "its access rules do not allow it, the server's user has no permission for it, or it is read-only there"
	case d.ioMode != "":
		return fmt.Sprintf("its rules say another io mode than %q, or another client may write to it", d.ioMode)
	case d.mode == blk.ReadOnly:
		return "the server's user has no permission for it"
	}
	return "another client has it for writing already, or the server's host forbids it"
}
