package ibverbs

import (
	"log/slog"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Config sets up the fabric. The zero value is ready to use.
type Config struct {
	// IRD and ORD are the RDMA READs that a connection serves and issues at a
	// time: 0 means 16 or the device's limit, negative none.
	IRD, ORD int
	// Logger gets one line per state change; default slog.Default().
	Logger *slog.Logger
}

var _ verbs.Chooser = (*Fabric)(nil)

// Info describes the fabric as a whole; its devices have names and abilities of
// their own.
func (f *Fabric) Info() verbs.Info {
	return verbs.Info{Fabric: "ibverbs", Name: "ibverbs", Port: 1, Caps: verbs.CapWriteImm}
}

func (c Config) withDefaults() Config {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	c.IRD, c.ORD = readDepth(c.IRD), readDepth(c.ORD)
	return c
}

func readDepth(n int) int {
	switch {
	case n == 0:
		return 16
	case n < 0:
		return 0
	}
	return min(n, 255)
}
