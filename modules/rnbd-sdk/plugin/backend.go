package plugin

import (
	"context"
	"fmt"
	"os"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
)

// Backend is an io plugin: storage that the server exports.
//
// Describe is called first. Open may be called from several goroutines at
// once. Serve runs once per queue at the same time as everything else, so
// data shared by Open and Serve needs care; a Disk reaches Serve only through
// requests, and only after its Open has returned.
type Backend interface {
	// Describe is called again after Configure, since the crash class may depend on the
	// settings; all else is the same then.
	Describe() Info
	// Open makes a disk ready for I/O. The client gets the errno in the chain
	// of the error; without one it gets EIO. A backend with a crash class
	// other than LosesAll takes its fence before it returns (package fence).
	Open(ctx context.Context, r OpenRequest) (Disk, error)
	// Serve answers the requests of q, those of all disks, until q.Closed().
	// It runs on a locked thread of its own. Before it returns, it has
	// stopped touching the buffers of requests. Returning while the queue is
	// open, with or without an error, ends the process, since the queue would
	// never be answered.
	Serve(q *Queue) error
}

// Disk is an open disk.
type Disk interface {
	// Limits is called after Open; requests are checked against them before
	// they reach Serve.
	Limits() blk.Limits
	// Close is called when no request of the disk is in flight and none will
	// come, and no Extents runs.
	Close() error
}

// Configurer is a Backend or Frontend that takes settings. Configure is called
// once, before queues and disks; it refuses unknown settings.
type Configurer interface {
	Configure(settings map[string]string) error
}

// Resizer is a Disk that can look at its backing store again. Requests go on
// meanwhile. The context ends when the disk is to be closed, which waits until Resize
// has returned.
type Resizer interface {
	Resize(ctx context.Context) (blk.Limits, error)
}

// Mapper is a Disk that knows what of it holds data.
//
// Extents lists the ranges from byte off on, at most extents.Max of them (see
// extents.Add), at least one, which together have at most n bytes. It may cover
// less than n: the host asks again. off and n are multiples of 512, n is not 0, and
// the range is within the limits; so are the ranges of the list. A hole reads as
// zeroes. Writes that were answered before the call lie in no hole, unless they were
// discarded since; in doubt a range holds data. The error is EOPNOTSUPP if this disk
// cannot tell.
//
// Extents runs on a goroutine of its own while requests go on. Of a disk one runs
// at a time, and Close comes after it has returned. Its context ends when its caller
// has given up, and when the disk is to be closed.
type Mapper interface {
	Extents(ctx context.Context, off, n uint64) ([]extents.Extent, error)
}

// Lister is a Backend of opaque names that can list those of its disks.
//
// ListNames returns names that Open takes, at most most of them, in any order. It may
// leave out names, as those of disks that Open makes. Its context ends when its caller
// has given up.
type Lister interface {
	ListNames(ctx context.Context, most int) ([]ListedName, error)
}

// ListedName is a name that a Lister knows, with the size of its disk in bytes, 0 if that
// is not known.
type ListedName struct {
	Name string
	Size uint64
}

// Verifying is a Disk that names the incarnation of its storage.
//
// Verifier returns up to MaxVerifier bytes. It is called after Open. The value is another
// one whenever a write that was answered, and that no flush has covered since, may have
// been lost, for instance since a remote store was started again. It is the same
// otherwise. Without a Verifier, or with an empty one, the host assumes by the plugin's
// crash class that such writes are lost with the process of the plugin, or with the
// kernel.
type Verifying interface {
	Verifier() []byte
}

// MaxVerifier bounds the bytes of a verifier.
const MaxVerifier = 64

// ArenaUser is a Backend or Frontend that wants to see the shared memory
// itself, to register it with the kernel say. AttachArena is called before any
// request names the arena, DetachArena when no request in flight does; mem is
// invalid after DetachArena returns.
type ArenaUser interface {
	AttachArena(id uint32, mem []byte) error
	DetachArena(id uint32)
}

// OpenRequest asks for a disk.
type OpenRequest struct {
	Device     uint32 // index of the disk in requests
	Name       string // as the client asked for it
	Mode       blk.AccessMode
	ReadOnly   bool     // never write; such requests are refused before Serve
	File       *os.File // O_PATH, closed after Open returns; nil for opaque names. See Reopen.
	Generation uint32   // of the plugin's process; above 1 an earlier one has died
}

// Reopen opens the file that the host resolved, with os.OpenFile's flags. The
// result belongs to the caller.
func (r OpenRequest) Reopen(flags int) (*os.File, error) {
	if r.File == nil {
		return nil, fmt.Errorf("open %q: no descriptor: %w", r.Name, blk.EINVAL)
	}
	f, err := reopen(r.File, flags)
	if err != nil {
		return nil, fmt.Errorf("open %q: %w", r.Name, err)
	}
	return f, nil
}

// Request is one I/O request: a copy, already checked against the limits of
// its disk and the bounds of its arena.
type Request struct {
	Disk  Disk
	Op    blk.Op
	Flags blk.Flags
	Prio  uint16 // Linux ioprio
	Len   uint32 // bytes of the range on the disk
	Tag   uint64 // below q.Depth(), and of no other request in flight on this queue
	Off   uint64 // byte on the disk
	// Buf is the payload of a read or write, Len bytes of shared memory; nil
	// for others. It may be used until Complete. Take nothing in it twice and
	// expect the same: the other side can write.
	Buf   []byte
	Arena uint32 // Buf as arena and offset, for ArenaUser
	// BufOff is the offset of Buf in the arena, in bytes.
	BufOff uint64
}
