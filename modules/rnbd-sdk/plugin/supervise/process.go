package supervise

import (
	"context"
	"log/slog"
	"os"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Process is a running plugin as a daemon sees it. *plugin.Process is one;
// another implementation runs in the daemon's own process, without gRPC and
// without sockets. The contract of each method is that of *plugin.Process.
type Process interface {
	Info() plugin.Info
	PID() int
	Exited() <-chan struct{} // closed when the process has ended
	Reaped() <-chan struct{} // closed when no thread of it runs any more
	ExitError() error        // why it ended; nil before, and after an orderly Stop
	Kill()                   // does not wait
	Stop(ctx context.Context) error

	AttachQueue(ctx context.Context, pump int, ring *shm.Ring) error
	AttachArena(ctx context.Context, id uint32, a *shm.Arena) error
	DetachArena(ctx context.Context, id uint32) error
	SetLog(ctx context.Context, level slog.Level) error
	Stats(ctx context.Context) (map[uint32]*latency.Snapshots, error)

	Disks
	Devices
}

// Disks are the calls of a storage plugin.
type Disks interface {
	OpenStorage(ctx context.Context, r plugin.OpenRequest) (plugin.OpenedDisk, error)
	CloseDisk(ctx context.Context, device uint32) error
	ResizeDisk(ctx context.Context, device uint32) (blk.Limits, error)
	Extents(ctx context.Context, device uint32, off, n uint64) ([]extents.Extent, error)
	ListNames(ctx context.Context, most int) ([]plugin.ListedName, error)
}

// Devices are the calls of a front end.
type Devices interface {
	AddDevice(ctx context.Context, s plugin.DeviceSpec) error
	RemoveDevice(ctx context.Context, index uint32, force bool) error
	ResizeDevice(ctx context.Context, index uint32, limits blk.Limits) error
	DeviceStatus(ctx context.Context, index uint32) (plugin.DeviceStatus, error)
	AddListener(ctx context.Context, name string, l *os.File) error
	SetTLS(ctx context.Context, t plugin.TLS) error
	ReleaseConnections(ctx context.Context, patience time.Duration) (released []plugin.Connection, closed int, err error)
	AdoptConnections(ctx context.Context, all []plugin.Connection) error
	ServeConnections(ctx context.Context) error
	TakeUsers(ctx context.Context) (events []plugin.UserEvent, lost uint64, err error)
}

var _ Process = (*plugin.Process)(nil)

// Launch starts a process. It honours the end of ctx; Config.OnExit is nil.
type Launch func(ctx context.Context, c plugin.Config) (Process, error)

// Exec is the Launch of executables.
func Exec(ctx context.Context, c plugin.Config) (Process, error) {
	p, err := plugin.Launch(ctx, c)
	if err != nil {
		return nil, err // not a *plugin.Process that is nil
	}
	return p, nil
}
