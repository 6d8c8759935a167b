package client

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-client/internal/mapline"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/loopdev"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Config is the configuration of a Client.
type Config struct {
	// Fabrics are the devices that paths may use, by the fabric's name.
	Fabrics map[string]verbs.Device
	// Reopen opens fabrics again whose addresses no two processes have at once: they
	// are closed by HandOver.
	Reopen map[string]func() (verbs.Device, error)
	// DefaultFabric is the fabric of paths without one.
	DefaultFabric string
	// Protect demands encrypted connections with proved identities at both
	// ends, on every path of every session. PeerName is the identity that
	// servers must prove; empty: the default of the fabric.
	Protect  bool
	PeerName string
	// Auth has the keys for challenges, by which both ends prove their identities
	// on paths without encryption; nil: none. AuthMode says when.
	Auth     verbs.Authenticator
	AuthMode rtrs.AuthMode
	// Resolver returns the routes of paths; nil: the paths' addresses are used.
	Resolver rtrs.Resolver
	// PreferredFabric is used instead of DefaultFabric if it is a verbs.Chooser
	// with a device that leads to the address. It is not used for loopback
	// addresses. Empty: none.
	PreferredFabric string
	// Hostname is part of generated session names.
	Hostname string

	Frontends []FrontendConfig
	// Launch starts the processes of front ends. If it is nil they are
	// executables.
	Launch supervise.Launch
	// NewRing makes the rings of front ends. Default shm.NewRing.
	NewRing func(entries int) (*shm.Ring, error)
	// Frontend serves mappings without a front end of their own: the name of
	// one of Frontends, or FrontendAuto, FrontendNBDSocket.
	Frontend string

	Pumps       int           // threads of the data path
	Spin        time.Duration // how long an idle pump polls before it sleeps; < 0: not at all
	Queues      int           // I/O connections per path; 0: one per pump
	RingEntries int           // requests in flight per pump and front-end process
	Slots       int           // requests in flight per device
	Timing      rtrs.Timing
	Policy      rtrs.Policy
	Loss        Loss // default of new mappings

	// LinkDir is the folder for links to devices with a node. Their names are
	// lasting: SESSION/PATH, with "!" for "/". Empty: no links.
	LinkDir string

	// LoopTool makes the loop devices of the front end "fuse-loop". Empty: there are none.
	LoopTool loopdev.Tool

	// Confine is what front ends keep of the daemon's rights.
	Confine confine.Config
	// SocketDir is the absolute path of the folder in which the sockets of front ends
	// are made. Empty: a temporary folder.
	SocketDir string

	// StateFile records mappings with a device node, so that the next daemon
	// serves them after this one was killed. Empty: no file.
	StateFile string

	// PluginPatience is how long New waits for the first processes of front ends. One that
	// does not run by then, or fails, is tried again and again, and the others serve. An
	// error of its configuration is that of New. 0: New waits, and returns each error.
	PluginPatience time.Duration

	// HoldUsers has users of front ends that listen wait in the backlog of the
	// sockets until ServeUsers is called.
	HoldUsers bool

	// Standby has the client serve nothing and leave the state file alone until
	// TakeOver and ServeUsers are called.
	Standby bool

	// ReservedNames are not given to mappings that ask for no name. Reserve changes
	// them.
	ReservedNames []string

	// HungAfter is the age from which a request without an answer is reported.
	// Zero: none is, and failed requests are counted but not logged.
	HungAfter time.Duration

	// Journal takes changes of state of sessions, paths, devices and plugins. If
	// it is nil none are kept.
	Journal *journal.Journal

	// MapTimeout bounds mapping, remapping and each step of unmapping.
	MapTimeout time.Duration

	// Logs has a logger for each part of the daemon: "client", "rtrs" and
	// "plugins". If it is nil all log to Logger.
	Logs   *logs.Logs
	Logger *slog.Logger

	// Virtual is for simulations under testing/synctest: pumps sleep on Go's
	// timers (pump.Config), and no other part of the daemon waits for the
	// system.
	Virtual bool
}

// FrontendConfig describes a front-end plugin.
type FrontendConfig struct {
	Name      string
	Path      string
	SHA256    []byte
	Configure map[string]string
	// Listen are sockets that the client opens for the plugin and keeps:
	// "unix:PATH" or "tcp:ADDRESS:PORT". One of TCP beyond loopback is refused
	// without TLS that is required, unless ",trusted" stands behind it: its network
	// is protected in another way, and users without TLS are served there.
	Listen []string
	// Sockets listen already, and go on when the client has ended: their users
	// wait for the next one. The client owns the files. One whose address is in
	// Listen takes its place.
	Sockets []*os.File
	// TrustedSockets are the same, as if ",trusted" stood behind their address.
	TrustedSockets []*os.File
	// Inherited are sockets of Listen that an earlier process of the daemon has
	// opened, by what stands in Listen. The client owns the files.
	Inherited map[string]*os.File
	// TLS returns how users of the sockets are served by TLS, but for Plain. It
	// looks for changes each time. Required does not change. nil: no TLS.
	TLS func() plugin.TLS
	// MountDir is the folder for the files of the front end "fuse": the client mounts one
	// for each device. The front end gets the descriptor of the mount. Empty: no mounts.
	MountDir string
	// Users takes what users of the sockets have done, and how many of their acts
	// are lost; nil: that is not asked for. It does not block.
	Users func(events []plugin.UserEvent, lost uint64)
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		DefaultFabric: "iwarp",
		Frontend:      FrontendAuto,
		Pumps:         pump.DefaultPumps(),
		RingEntries:   1024,
		Slots:         128,
		Timing:        rtrs.DefaultTiming(),
		Policy:        rtrs.MinInflight,
		MapTimeout:    30 * time.Second,
		Logger:        slog.New(slog.DiscardHandler),
	}
}

// nameLoggers registers the parts with Logs before they log.
func (c *Config) nameLoggers() {
	if c.Logs != nil {
		c.Logs.Logger("rtrs")
		c.Logs.Logger("plugins")
	}
}

// subsystemLogger returns the logger of a part of the daemon.
func (c *Config) subsystemLogger(subsystem string) *slog.Logger {
	if c.Logs != nil {
		return c.Logs.Logger(subsystem)
	}
	return c.Logger
}

func (c *Config) checkValues() error {
	switch {
	case c.Pumps < 1 || c.Pumps > 64:
		return fmt.Errorf("pumps: %d is not between 1 and 64", c.Pumps)
	case c.RingEntries < 16 || c.RingEntries&(c.RingEntries-1) != 0:
		return fmt.Errorf("ring entries: %d is not a power of two from 16 up", c.RingEntries)
	case c.Slots < 1 || c.Slots > c.RingEntries:
		return fmt.Errorf("slots: %d is not between 1 and the %d ring entries", c.Slots, c.RingEntries)
	case c.Logger == nil && c.Logs == nil:
		return errors.New("no logger")
	}
	if err := c.Confine.Check(); err != nil {
		return fmt.Errorf("confinement of plugins: %w", err)
	}
	return nil
}

// Loss is the treatment of requests while there is no path to the server.
type Loss struct {
	// Queue is the time for which requests wait before they fail with EIO,
	// counted from the loss of the last path. Zero: they fail at once. Forever:
	// they wait until a path is back or the device is unmapped.
	Queue time.Duration
}

// isOver reports whether a request that was lost so many nanoseconds ago waits no longer.
func (l Loss) isOver(ago int64) bool { return l.Queue != 0 && ago > int64(l.Queue) }

// Forever is the Loss.Queue of requests that wait without a limit.
const Forever = time.Duration(math.MaxInt64)

// ParseLoss parses "fail", "queue:DURATION" or "queue:forever". Empty means
// "fail".
func ParseLoss(s string) (Loss, error) {
	if s == "" || s == "fail" {
		return Loss{}, nil
	}
	if s == "queue:forever" {
		return Loss{Queue: Forever}, nil
	}
	if v, ok := strings.CutPrefix(s, "queue:"); ok {
		if d, err := time.ParseDuration(v); err == nil && d > 0 {
			return Loss{Queue: d}, nil
		}
	}
	return Loss{}, fmt.Errorf(`loss %q: use "fail", "queue:30s" or "queue:forever"`, s)
}

func (l Loss) String() string {
	if l.Queue == 0 {
		return "fail"
	}
	if l.Queue == Forever {
		return "queue:forever"
	}
	return "queue:" + l.Queue.String()
}

// Names of front ends beside those of plugins.
const (
	// FrontendAuto is the first of these that works on the host: a ublk disk,
	// a disk of the kernel's NBD client, a loop device on a file of the plugin
	// "fuse", an NBD export on the daemon's sockets.
	FrontendAuto = "auto"
	// FrontendNBDSocket is the plugin "nbd" with sockets only, without a disk.
	FrontendNBDSocket = "nbd-socket"
	// FrontendFuseLoop is the plugin "fuse" with a loop device on each file.
	FrontendFuseLoop = "fuse-loop"
	// FrontendNone is no front end: NewIO gives access to the device.
	FrontendNone = "none"

	frontendUblk = "ublk"
	frontendNBD  = "nbd"
	frontendFuse = "fuse"

	// settingAttach is the setting of the plugin "nbd" for the kernel's
	// client: "auto" uses it if there is one, "no" does not.
	settingAttach = "attach"
	// settingLoop is the setting of the plugin "fuse" for a loop device on the file, with
	// the value loopYes.
	settingLoop = "loop"
	loopYes     = "yes"
)

// DefaultPort is the port of RNBD servers.
const DefaultPort = mapline.DefaultPort

// forcedClose bounds each wait of an unmap for a silent server: for the front
// end's last requests, for the client's own, and for CLOSE. Together they
// take less than 5 s.
const forcedClose = 1200 * time.Millisecond

// MaxDevices bounds the devices of one client.
const MaxDevices = 4096

// maxSectors bounds sizes. In bytes they stay far below 64 bits.
const maxSectors = 1 << 54
