package server

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/access"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/audit"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/journal"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/confine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/pump"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rnbd-server/volume"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Config is the configuration of a Server. DefaultConfig gives the defaults;
// New refuses values that cannot work.
type Config struct {
	// SearchPath is the root of clients' names; %SESSNAME% is replaced by the
	// session's name, %IDENTITY% by the folder of the identity that the client
	// has proved. If it is empty names start at / and only BlockDevices
	// are served.
	SearchPath string
	// BlockDevices are patterns, as path.Match has them, of the block devices that are
	// served without a SearchPath: one matches the name that a client asks for, behind a
	// slash, or the path that the name leads to.
	BlockDevices []string
	// Pools are the pools of volumes.
	Pools []volume.Config
	// ServeInUse also serves block devices that this host uses: mounted ones, swap areas,
	// and those that other devices are built on. Others are opened exclusively for writing.
	ServeInUse bool
	// Listen are the fabrics and addresses to serve on. With Standby the server
	// does not listen until Serve is called.
	Listen  []Listen
	Standby bool
	// Auth has the keys for challenges of clients; nil: none.
	Auth verbs.Authenticator
	// Plugins are the storage plugins. The first one with a matching rule or
	// kind of node serves a device.
	Plugins []PluginConfig
	// PluginPatience is how long New waits for the first processes of plugins. One that
	// does not run by then, or fails, is tried again and again, and the others serve. An
	// error of its configuration is that of New. 0: New waits, and returns each error.
	PluginPatience time.Duration
	// Rules choose a plugin by the name of the device, before its kind is
	// considered. The first match wins.
	Rules []Rule

	Pumps            int           // threads of the data path, each with one of a plugin's
	Spin             time.Duration // how long an idle pump polls before it sleeps; < 0: not at all
	QueueDepth       int           // requests in flight per session
	ChunkSize        int           // bytes per request, 4096 of them for headers
	RingEntries      int           // requests in flight per pump and plugin
	AlwaysInvalidate bool          // change a chunk's key after each request
	Timing           rtrs.Timing

	// List allows clients to list the names below SearchPath, with their sizes
	// and users.
	List bool

	// Limits bound the resources of the transport that clients can use.
	// InfoTimeout bounds the time until a path is connected.
	Limits      rtrs.Limits
	InfoTimeout time.Duration
	// SessionDevices bounds the open devices of a session, Opens the OPENs
	// under way in all sessions. 0 means no limit.
	SessionDevices, Opens int

	// BootID names the running kernel of the storage's host. Clients are told a number made
	// of it. Another BootID says that the host lost what its disks had in their caches. New
	// reads that of this host if it is empty.
	BootID string

	// IncarnationFile is a file of the server alone that outlives the host's reboots. It has
	// the record of orderly stops: after one, clients are not told of a power cut. If it is
	// empty, or cannot be written, every start of the host is told as a power cut.
	IncarnationFile string

	// Access are the rules of access. nil allows everything. SetAccess
	// changes them.
	Access *access.Rules

	// Journal takes changes of state of sessions, paths, devices and plugins. If
	// it is nil none are kept.
	Journal *journal.Journal

	// Audit records sessions, paths, devices and rules. nil records nothing.
	// New and Close do not close it.
	Audit *audit.Log

	// Confine is what plugins keep of the daemon's rights. SearchPathLater is set if
	// the folder of the search path may appear after the start.
	Confine         confine.Config
	SearchPathLater bool
	// SocketDir is the absolute path of the folder in which the sockets of plugins are
	// made. Empty: a temporary folder.
	SocketDir string

	// After CrashLimit crashes within CrashWindow a plugin is given up: it is
	// not started again.
	CrashLimit  int
	CrashWindow time.Duration
	// FenceTimeout is the time after which a device counts as stuck if it
	// still waits for a dead plugin's I/O. It goes on waiting, and delays no
	// other device.
	FenceTimeout time.Duration
	// RetireAfter is how long a closing path waits for its requests. After it
	// the requests are retired and their devices are stuck.
	RetireAfter time.Duration
	// HungAfter is the age from which a request without an answer is reported.
	// Zero: none is, and failed requests are counted but not logged.
	HungAfter time.Duration
	// SizePoll is the interval at which the sizes of open files and devices
	// are checked; < 0: never.
	SizePoll time.Duration

	// Logs has a logger for each part of the daemon: "server", "rtrs" and
	// "plugins". If it is nil all log to Logger.
	Logs   *logs.Logs
	Logger *slog.Logger

	// Virtual is for simulations under testing/synctest: pumps sleep on Go's
	// timers (pump.Config), and no other part of the daemon waits for the
	// system.
	Virtual bool

	// Launch starts plugins, and NewRing makes their rings. They are set only
	// if plugins run in this process.
	Launch  supervise.Launch
	NewRing func(entries int) (*shm.Ring, error)
	// Set by tests, to simulate a file system that does not answer.
	lookUp        func(j jail, session, name string) (*node, error)
	lookUpTimeout time.Duration
	// extentsTimeout is shorter in tests.
	extentsTimeout time.Duration
}

// Listen is one end point.
type Listen struct {
	Device verbs.Device
	Addr   netip.AddrPort
	Auth   rtrs.AuthMode // challenges of clients without TLS
}

// PluginConfig describes an io plugin.
type PluginConfig struct {
	Name      string // its name in rules and lists
	Path      string // path of the executable
	SHA256    []byte // nil: not checked
	Configure map[string]string
}

// Rule sends devices with names matching Glob to Plugin.
type Rule struct {
	Glob   string // pattern of path.Match; without a slash "*" and "?" match slashes, too
	Plugin string
}

// DefaultConfig returns the defaults, those of the kernel's server where it has
// any.
func DefaultConfig() Config {
	return Config{
		Pumps:            pump.DefaultPumps(),
		QueueDepth:       512,
		ChunkSize:        131072,
		RingEntries:      1024,
		AlwaysInvalidate: true,
		Timing:           rtrs.DefaultTiming(),
		Limits:           rtrs.DefaultLimits(),
		InfoTimeout:      rtrs.DefaultServerConfig().InfoTimeout,
		SessionDevices:   1024,
		Opens:            4096,
		List:             true,
		CrashLimit:       3,
		CrashWindow:      time.Minute,
		FenceTimeout:     5 * time.Second,
		RetireAfter:      5 * time.Second,
		SizePoll:         time.Second,
		Logger:           slog.New(slog.DiscardHandler),
		lookUp:           jail.openName,
		lookUpTimeout:    lookUpTimeout,
		extentsTimeout:   extentsTimeout,
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
	case len(c.Plugins) == 0:
		return errors.New("no io plugin is configured")
	case c.RingEntries < 16 || c.RingEntries&(c.RingEntries-1) != 0:
		return fmt.Errorf("ring entries: %d is not a power of two from 16 up", c.RingEntries)
	case c.SessionDevices < 0 || c.Opens < 0:
		return fmt.Errorf("limit of %d devices per session, %d OPENs: a limit is not negative", c.SessionDevices, c.Opens)
	case c.Logger == nil && c.Logs == nil:
		return errors.New("no logger")
	}
	if err := c.Confine.Check(); err != nil {
		return fmt.Errorf("confinement of plugins: %w", err)
	}
	for _, pattern := range c.BlockDevices {
		if _, err := path.Match(pattern, ""); err != nil || !path.IsAbs(pattern) {
			return fmt.Errorf("block device %q: write a path or a pattern as /dev/vg0/*", pattern)
		}
	}
	for _, r := range c.Rules {
		if _, err := path.Match(r.Glob, ""); err != nil {
			return fmt.Errorf("io mode rule %q: %w", r.Glob, err)
		}
		if !c.hasPlugin(r.Plugin) {
			return fmt.Errorf("io mode rule %q: there is no plugin %q", r.Glob, r.Plugin)
		}
	}
	return nil
}

func (c *Config) hasPlugin(name string) bool {
	for _, p := range c.Plugins {
		if p.Name == name {
			return true
		}
	}
	return false
}

// MaxSessions bounds the sessions of one server.
const MaxSessions = 4096

// lookUpTimeout is the time for which an OPEN waits for the file system.
const lookUpTimeout = 10 * time.Second

// extentsTimeout bounds an EXTENTS: docs/extend/protocol/rnbd.md, "Extents".
const extentsTimeout = 5 * time.Second
