package client

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/supervise"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Config says what a Client does.
type Config struct {
	// Fabrics are the devices that paths may use, by the fabric's name.
	Fabrics map[string]verbs.Device
	// DefaultFabric is used by paths that name none.
	DefaultFabric string
	// PreferredFabric comes before it where it is a verbs.Chooser with a device
	// that leads to the address, loopback addresses aside; empty: none.
	PreferredFabric string
	// Hostname is part of the names of sessions that are made up.
	Hostname string

	Frontends []FrontendConfig
	// Launch starts the processes of front ends; nil: as executables.
	Launch supervise.Launch
	// NewRing makes the rings of front ends; nil: shm.NewRing.
	NewRing func(entries int) (*shm.Ring, error)
	// Frontend serves the mappings that name none: the name of one of
	// Frontends, or FrontendAuto, FrontendNBDSocket.
	Frontend string

	Pumps       int
	Spin        time.Duration // how long an idle pump looks before it sleeps; < 0: not at all
	Queues      int           // I/O connections per path; 0: one per pump
	RingEntries int           // requests in flight per pump and front-end process
	Slots       int           // requests in flight per device
	Timing      rtrs.Timing
	Policy      rtrs.Policy
	Loss        Loss // default of new mappings

	// LinkDir is where devices that have a node get a link of a lasting name:
	// SESSION/PATH, with "!" for "/". Empty: no links.
	LinkDir string

	// StateFile is where mappings with a device node are written down, so that
	// the next daemon serves them after this one was killed. Empty: nowhere.
	StateFile string

	// MapTimeout bounds mapping, remapping and each step of unmapping.
	MapTimeout time.Duration

	// Logs has a logger for each part of the daemon: "client", "rtrs" and
	// "plugins". nil: all log to Logger.
	Logs   *logs.Logs
	Logger *slog.Logger

	// Virtual is for simulations under testing/synctest: pumps sleep on Go's timers
	// (pump.Config), and nothing else of the daemon waits for the system.
	Virtual bool
}

// FrontendConfig names a front-end plugin.
type FrontendConfig struct {
	Name      string
	Path      string
	SHA256    []byte
	Configure map[string]string
	// Listen are sockets that the client opens and keeps for the plugin:
	// "unix:PATH" or "tcp:ADDRESS:PORT".
	Listen []string
}

// DefaultConfig returns the defaults.
func DefaultConfig() Config {
	return Config{
		DefaultFabric: "iwarp",
		Frontend:      FrontendAuto,
		Pumps:         2,
		RingEntries:   1024,
		Slots:         128,
		Timing:        rtrs.DefaultTiming(),
		Policy:        rtrs.MinInflight,
		MapTimeout:    30 * time.Second,
		Logger:        slog.New(slog.DiscardHandler),
	}
}

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
	case c.RingEntries < 16 || c.RingEntries&(c.RingEntries-1) != 0:
		return fmt.Errorf("ring entries: %d is not a power of two from 16 up", c.RingEntries)
	case c.Slots < 1 || c.Slots > c.RingEntries:
		return fmt.Errorf("slots: %d is not between 1 and the %d ring entries", c.Slots, c.RingEntries)
	case c.Logger == nil && c.Logs == nil:
		return errors.New("no logger")
	}
	return nil
}

// Loss is what happens to requests while no path to the server is left.
type Loss struct {
	// Queue: requests wait for that long, counted from the loss of the last
	// path, before they fail with EIO. Zero: they fail at once.
	Queue time.Duration
}

// ParseLoss reads "fail" or "queue:DURATION"; empty is "fail".
func ParseLoss(s string) (Loss, error) {
	if s == "" || s == "fail" {
		return Loss{}, nil
	}
	if v, ok := strings.CutPrefix(s, "queue:"); ok {
		if d, err := time.ParseDuration(v); err == nil && d > 0 {
			return Loss{Queue: d}, nil
		}
	}
	return Loss{}, fmt.Errorf(`loss %q: use "fail" or "queue:30s"`, s)
}

func (l Loss) String() string {
	if l.Queue == 0 {
		return "fail"
	}
	return "queue:" + l.Queue.String()
}

// devices returns the fabrics, sorted by name.
func (c *Config) devices() (out []verbs.Device) {
	for _, name := range slices.Sorted(maps.Keys(c.Fabrics)) {
		out = append(out, c.Fabrics[name])
	}
	return out
}
