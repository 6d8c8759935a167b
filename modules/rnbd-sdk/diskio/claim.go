package diskio

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/fence"
)

// descriptions is how many descriptions a disk may have.
const descriptions = 2

// Open reopens the file of r and takes the fence of the description, which is
// the which-th (0 or 1) of this disk. When it returns nil no I/O of an earlier
// process through the same description of the same disk can reach the file any
// more. While there is such I/O it waits, until ctx ends: then the error is
// EBUSY. The file is closed on exec.
func Open(ctx context.Context, r plugin.OpenRequest, flags int, which uint32) (*os.File, error) {
	f, err := r.Reopen(flags)
	if err != nil {
		return nil, err
	}
	err = fence.Lock(ctx, f, r.Device*descriptions+which)
	if err == nil {
		return f, nil
	}
	f.Close()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("open %q: another process still uses it as device %d: %v: %w", r.Name, r.Device, err, blk.EBUSY)
	}
	return nil, fmt.Errorf("open %q: %w", r.Name, err)
}

// Writable tells whether r may be opened for writing.
func Writable(r plugin.OpenRequest) bool { return !r.ReadOnly && r.Mode != blk.ReadOnly }

// AccessFlags are the flags of os.OpenFile for r.
func AccessFlags(r plugin.OpenRequest) int {
	if Writable(r) {
		return os.O_RDWR
	}
	return os.O_RDONLY
}

// CheckKind looks at the node without opening it: ENOTBLK unless it is of the
// given kind, as in unix.S_IFBLK.
func CheckKind(r plugin.OpenRequest, kind uint32) error {
	if r.File == nil {
		return fmt.Errorf("open %q: no descriptor: %w", r.Name, blk.EINVAL)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(r.File.Fd()), &st); err != nil {
		return fmt.Errorf("open %q: %w", r.Name, err)
	}
	if st.Mode&unix.S_IFMT != kind {
		return fmt.Errorf("open %q: %s, not %s: %w", r.Name, kindName(st.Mode), kindName(kind), blk.ENOTBLK)
	}
	return nil
}

func kindName(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFBLK:
		return "block device"
	case unix.S_IFREG:
		return "regular file"
	case unix.S_IFDIR:
		return "directory"
	case unix.S_IFCHR:
		return "character device"
	}
	return "special file"
}
