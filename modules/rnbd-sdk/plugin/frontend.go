package plugin

import (
	"context"
	"os"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// Frontend is a front-end plugin: how the client's devices appear to users.
// All methods but Serve may be called from several goroutines at once.
type Frontend interface {
	Describe() Info
	// AddDevice makes a device appear. Requests for it carry s.Index and
	// s.ArenaID; payload is in s.Arena.
	AddDevice(ctx context.Context, s DeviceSpec) error
	// RemoveDevice takes it away; EBUSY in the chain while it is in use and
	// force is not set. When it returns nil the plugin no longer touches the
	// device's memory.
	RemoveDevice(ctx context.Context, index uint32, force bool) error
	// ResizeDevice tells users of a new size, or other limits.
	ResizeDevice(ctx context.Context, index uint32, limits blk.Limits) error
	// AddListener gives a listening socket to serve on. l belongs to the
	// plugin. The host decides the names.
	AddListener(ctx context.Context, name string, l *os.File) error
	// Openers is how many users have the device open.
	Openers(index uint32) int
	// Serve moves requests of q until q.Closed(), on a locked thread of its
	// own. Returning earlier ends the process.
	Serve(q *FrontQueue) error
}

// Locator is a Frontend that can say where a user finds a device: a path, a
// URL.
type Locator interface {
	Location(index uint32) string
}

// DeviceSpec describes a device to a front end.
type DeviceSpec struct {
	Index      uint32 // of the device in ring entries
	Name       string
	Limits     blk.Limits
	ArenaID    uint32 // of the device's memory in ring entries
	Arena      []byte // slot i is Arena[i*SlotSize:][:SlotSize]; valid until RemoveDevice returns
	ArenaFD    int    // the file behind Arena, from offset 0; the SDK's, valid as long
	SlotSize   int    // bytes
	Slots      int
	Generation uint32            // of the plugin's process
	Queues     int               // queues that the host has attached; Serve may just be beginning
	Config     map[string]string // settings of this device
	// Identity names the mapping, uniquely on this host, for as long as it
	// lasts: processes come and go under it. A front end that leaves something
	// behind when it dies marks it with this.
	Identity string
	// Location is the device's location under an earlier process of the front
	// end, empty if there was none. A front end with devices that outlive it
	// takes over the device there. With LocationUnknown an earlier process may
	// have left a device with that Identity at an unknown location: the front
	// end takes it over, or returns ENODEV if there is none.
	Location string
	// Channel carries the requests of the device's users where the host has
	// opened it, else it is nil. The front end "fuse" gets a descriptor of
	// /dev/fuse whose mount at Location shows the device. The file belongs to
	// the plugin, and the plugin closes the file; the host keeps a descriptor of its own, and
	// hands it to the next process.
	Channel *os.File
}

// LocationUnknown is a DeviceSpec.Location that has to be looked for.
const LocationUnknown = "?"

// DeviceStatus is a front end's report about a device.
type DeviceStatus struct {
	Openers  int
	Location string // where a user finds it; empty: not known
}
