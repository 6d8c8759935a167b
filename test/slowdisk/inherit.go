package slowdisk

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// keepFromChildren marks all our descriptors of the file as not to be
// inherited. go-fuse opens its device without that. A child that had it would
// keep the connection alive after the end of the test's process: whoever waits
// for the medium then waits for ever, the child itself included.
func keepFromChildren(path string) error {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("look for descriptors of %s: %w", path, err)
	}
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil || target != path {
			continue
		}
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			return fmt.Errorf("descriptor %q: %w", e.Name(), err)
		}
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC); err != nil {
			return fmt.Errorf("descriptor %d of %s: %w", fd, path, err)
		}
	}
	return nil
}
