package server

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path"
	"runtime"
	"slices"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Config says what a Server does. DefaultConfig gives the defaults; New
// refuses what cannot work.
type Config struct {
	// SearchPath is the folder below which clients' names are looked up;
	// %SESSNAME% stands for the session's name. Empty: names start at /, and
	// only block devices are served.
	SearchPath string
	// Listen are the fabrics and addresses to serve on.
	Listen []Listen
	// Plugins are the storage plugins. The first whose rule or kind of node
	// matches serves a device.
	Plugins []PluginConfig
	// Rules choose a plugin by name of the device, before its kind is looked
	// at; first match wins.
	Rules []Rule

	Pumps            int           // threads of the data path, each with one of a plugin's
	Spin             time.Duration // how long an idle pump looks before it sleeps; < 0: not at all
	QueueDepth       int           // requests in flight per session
	ChunkSize        int           // bytes per request, 4096 of them for headers
	RingEntries      int           // requests in flight per pump and plugin
	AlwaysInvalidate bool          // change a chunk's key after each request
	Timing           rtrs.Timing

	// Limits bound what clients can take of the transport, and InfoTimeout how long
	// a path may take until it is connected.
	Limits      rtrs.Limits
	InfoTimeout time.Duration
	// SessionDevices bounds the devices that a session has open, Opens the OPENs
	// under way in all; 0: no limit.
	SessionDevices, Opens int

	// CrashLimit crashes of one plugin within CrashWindow are too many: it is
	// not started again.
	CrashLimit  int
	CrashWindow time.Duration
	// FenceTimeout is how long a device may wait for a dead plugin's I/O
	// before it counts as stuck; it goes on waiting, alone.
	FenceTimeout time.Duration
	// RetireAfter is how long a path that closes waits for requests that do not
	// end, before it goes without them: then their device is stuck.
	RetireAfter time.Duration
	// SizePoll is how often the sizes of files and devices that are open are
	// looked at; < 0: never.
	SizePoll time.Duration

	// Logs has a logger for each part of the daemon: "server", "rtrs" and
	// "plugins". nil: all log to Logger.
	Logs   *logs.Logs
	Logger *slog.Logger

	// Virtual is for simulations under testing/synctest: pumps sleep on Go's timers
	// (pump.Config), and nothing else of the daemon waits for the system.
	Virtual bool

	// Launch starts plugins, and NewRing makes their rings: nil, unless plugins
	// run in this process.
	Launch  supervise.Launch
	NewRing func(entries int) (*shm.Ring, error)
	// Tests have file systems that do not answer.
	lookUp        func(j jail, session, name string) (*node, error)
	lookUpTimeout time.Duration
}

// Listen is one end point.
type Listen struct {
	Device verbs.Device
	Addr   netip.AddrPort
}

// PluginConfig names an io plugin.
type PluginConfig struct {
	Name      string // as rules and listings call it
	Path      string // of the executable
	SHA256    []byte // nil: not checked
	Configure map[string]string
}

// Rule sends devices whose name matches Glob to Plugin.
type Rule struct {
	Glob   string // as path.Match
	Plugin string
}

// DefaultConfig returns the defaults of the kernel's server where it has any.
func DefaultConfig() Config {
	return Config{
		Pumps:            defaultPumps(),
		QueueDepth:       512,
		ChunkSize:        131072,
		RingEntries:      1024,
		AlwaysInvalidate: true,
		Timing:           rtrs.DefaultTiming(),
		Limits:           rtrs.DefaultLimits(),
		InfoTimeout:      rtrs.DefaultServerConfig().InfoTimeout,
		SessionDevices:   1024,
		Opens:            4096,
		CrashLimit:       3,
		CrashWindow:      time.Minute,
		FenceTimeout:     5 * time.Second,
		RetireAfter:      5 * time.Second,
		SizePoll:         time.Second,
		Logger:           slog.New(slog.DiscardHandler),
		lookUp:           jail.open,
		lookUpTimeout:    lookUpTimeout,
	}
}

// defaultPumps is 2 where there are CPUs for them and for as many threads of a
// storage plugin, who work on the same requests.
func defaultPumps() int { return min(max(runtime.NumCPU()/2, 1), 2) }

// nameLoggers makes the parts known before they log.
func (c *Config) nameLoggers() {
	if c.Logs != nil {
		c.Logs.Logger("rtrs")
		c.Logs.Logger("plugins")
	}
}

// logger is that of a part of the daemon.
func (c *Config) logger(subsystem string) *slog.Logger {
	if c.Logs != nil {
		return c.Logs.Logger(subsystem)
	}
	return c.Logger
}

func (c *Config) check() error {
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

// devices returns the fabrics that the server listens on.
func (c *Config) devices() (out []verbs.Device) {
	for _, l := range c.Listen {
		if !slices.Contains(out, l.Device) {
			out = append(out, l.Device)
		}
	}
	return out
}
