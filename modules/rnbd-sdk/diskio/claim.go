package diskio

import (
	"context"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/fence"
)

// Bytes of the fence. All writers of a file use the same two, so that the last
// writes of a killed server delay the next server too, and two servers never
// write to one file. A reader's late I/O can damage only its own host's memory,
// so each device has a byte of its own and there may be many readers.
const (
	descriptions = 2  // of one disk
	firstReader  = 16 // slot of device 0; the writer's are 0 and 1
)

func slotOf(r plugin.OpenRequest, which uint32) uint32 {
	if Writable(r) {
		return which
	}
	return firstReader + r.Device*descriptions + which
}

// Open reopens the file of r and takes the fence of the description; which (0
// or 1) is its number for this disk. When it returns nil, no I/O of an earlier
// process through the same description can reach the file any more; for a
// writer, no other process has the file open for writing through Open. It waits
// for such I/O until ctx ends; then the error is EBUSY. The file is closed on
// exec.
func Open(ctx context.Context, r plugin.OpenRequest, flags int, which uint32) (*os.File, error) {
	f, err := r.Reopen(flags)
	if err != nil {
		return nil, err
	}
	err = fence.Lock(ctx, f, slotOf(r, which))
	if err == nil {
		return f, nil
	}
	f.Close()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("open %q: another process has it open for writing, or its last I/O has not ended: %v: %w", r.Name, err, blk.EBUSY)
	}
	return nil, fmt.Errorf("open %q: %w", r.Name, err)
}

// Writable reports whether r may be opened for writing.
func Writable(r plugin.OpenRequest) bool { return !r.ReadOnly && r.Mode != blk.ReadOnly }

// AccessFlags returns the flags of os.OpenFile for r.
func AccessFlags(r plugin.OpenRequest) int {
	if Writable(r) {
		return os.O_RDWR
	}
	return os.O_RDONLY
}

// CheckKind returns ENOTBLK unless the node of r is of one of the given kinds,
// such as unix.S_IFBLK. It does not open the node.
func CheckKind(r plugin.OpenRequest, kinds ...uint32) error {
	if r.File == nil {
		return fmt.Errorf("open %q: no descriptor: %w", r.Name, blk.EINVAL)
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(r.File.Fd()), &st); err != nil {
		return fmt.Errorf("open %q: %w", r.Name, err)
	}
	if !slices.Contains(kinds, st.Mode&unix.S_IFMT) {
		return fmt.Errorf("open %q: %s, not %s: %w", r.Name, kindName(st.Mode), kindName(kinds[0]), blk.ENOTBLK)
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
