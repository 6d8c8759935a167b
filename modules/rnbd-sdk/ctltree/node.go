package ctltree

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
)

// Node is a *File, a Link or a Dir; for Mount also a Folder.
type Node interface {
	// mode is the type and the permissions, as of stat(2).
	mode() uint32
}

// File is a control file. Its mode follows from its functions: 0444, 0644 or
// 0200.
type File struct {
	// Show returns the contents for a reader. nil: the file cannot be read.
	Show func() (string, error)
	// Store executes the data of one write(2), up to MaxStore bytes. ctx ends
	// when the writer is interrupted or the tree is closed; the writer's errno
	// does not depend on Store then. nil: the file cannot be written.
	Store func(ctx context.Context, data []byte) error
}

// MaxStore is the longest command. Linux's is one page.
const MaxStore = 4096

func (f *File) mode() uint32 {
	m := uint32(syscall.S_IFREG)
	if f.Show != nil {
		m |= 0o444
	}
	if f.Store != nil {
		m |= 0o200
	}
	return m
}

// Link is a symbolic link; its value is the target.
type Link string

func (Link) mode() uint32 { return syscall.S_IFLNK | 0o777 }

// Folder is a place for Mount only: an empty folder for the mounts of another
// daemon.
type Folder struct{}

func (Folder) mode() uint32 { return dirMode }

// BlockStat returns the file stat of a block device
// (Documentation/block/stat.rst in Linux), with the known figures: sectors of
// 512 bytes read and written, and requests in flight.
func BlockStat(read, written uint64, inFlight int64) string {
	return fmt.Sprintf("%8d %8d %8d %8d %8d %8d %8d %8d %8d %8d %8d %8d %8d %8d %8d %8d %8d",
		0, 0, read, 0, 0, 0, written, 0, inFlight, 0, 0, 0, 0, 0, 0, 0, 0)
}

// Dir is a directory.
type Dir interface {
	Node
	// List returns the names in the directory.
	List() []string
	// Lookup returns the node with that name, nil if there is none.
	Lookup(name string) Node
}

const dirMode = syscall.S_IFDIR | 0o755

// Fixed is a directory with entries that do not change once it is served.
type Fixed map[string]Node

func (Fixed) mode() uint32 { return dirMode }

// List implements Dir.
func (d Fixed) List() []string { return slices.Sorted(maps.Keys(d)) }

// Lookup implements Dir.
func (d Fixed) Lookup(name string) Node {
	if n, ok := d[name]; ok {
		return n
	}
	return nil
}

// Listing is a directory with entries that are computed at each look-up and
// read.
type Listing struct {
	Names func() []string
	// Node returns nil for a name that is not there, or no more.
	Node func(name string) Node
}

func (Listing) mode() uint32 { return dirMode }

// List implements Dir.
func (d Listing) List() []string { return d.Names() }

// Lookup implements Dir.
func (d Listing) Lookup(name string) Node { return d.Node(name) }

// Text is a file that can only be read; a newline is added.
func Text(show func() string) *File {
	return &File{Show: func() (string, error) { return show() + "\n", nil }}
}

// Command is a file that is written, and says how when it is read. The command
// comes without its last newline.
func Command(usage string, run func(ctx context.Context, command string) error) *File {
	return &File{
		Show:  func() (string, error) { return usage + "\n", nil },
		Store: func(ctx context.Context, data []byte) error { return run(ctx, Word(data)) },
	}
}

// Word returns the written text without its last newline.
func Word(data []byte) string { return strings.TrimSuffix(string(data), "\n") }

// errnoOf returns the errno of err for a reader or writer.
func errnoOf(err error) syscall.Errno {
	var errno syscall.Errno
	switch {
	case err == nil:
		return 0
	case errors.As(err, &errno) && errno != 0:
		return errno
	case errors.Is(err, context.Canceled):
		return syscall.EINTR
	case errors.Is(err, context.DeadlineExceeded):
		return syscall.ETIMEDOUT
	}
	return syscall.EIO
}

// Find follows path, names with slashes between them, from n down. nil: there
// is no such node. Links are not followed.
func Find(n Node, path string) Node {
	for name := range strings.SplitSeq(path, "/") {
		dir, ok := n.(Dir)
		if !ok {
			return nil
		}
		if n = dir.Lookup(name); n == nil {
			return nil
		}
	}
	return n
}
