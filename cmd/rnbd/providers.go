package main

import (
	"fmt"
	"log/slog"
	"sort"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/logs"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/selfstats"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/ibverbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/provider/rocev2"
	"github.com/rnbd-go/rnbd/modules/rtrs/tlsauth"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// defaultFabric is used where an address names none. A client tries
// preferredFabric first, where an RDMA device leads to the address.
const (
	defaultFabric   = "iwarp"
	preferredFabric = "ibverbs"
)

// fabricConfig is the users' configuration of fabrics.
type fabricConfig struct {
	MPACRC bool
	Timing rtrs.Timing
	TLS    *tlsauth.Auth // nil: none
	Accept iwarp.TLSMode // of listeners
	Logs   *logs.Logs
	Logger *slog.Logger // of one fabric, made by openFabrics
}

// fabrics are the providers of this build.
var fabrics = map[string]func(fabricConfig) (verbs.Device, error){
	"iwarp": func(c fabricConfig) (verbs.Device, error) {
		cfg := iwarp.DefaultConfig()
		cfg.CRC = c.MPACRC
		cfg.RNRTimeout = -1 // RTRS asks for endless RNR retries
		cfg.PeerTimeout = peerTimeout(c.Timing)
		cfg.TLS, cfg.AcceptTLS = c.TLS, c.Accept
		cfg.Logger = c.Logger
		return iwarp.Open(cfg)
	},
	"ibverbs": func(c fabricConfig) (verbs.Device, error) {
		// It looks for libraries and devices when it is first used. Without
		// cgo it is a stub with an error.
		return ibverbs.Open(ibverbs.Config{IRD: -1, ORD: -1, Logger: c.Logger}), nil
	},
	"rocev2": func(c fabricConfig) (verbs.Device, error) {
		// Its UDP ports are bound when an address is first used. RTRS uses no
		// RDMA READs and declares that when it connects.
		return rocev2.Open(rocev2.Config{IRD: -1, ORD: -1, Logger: c.Logger})
	},
}

// peerTimeout is the time for which a connection may be silent while an
// answer is due. Heartbeats detect the loss of a peer within
// HeartbeatMisses+2 ticks; one connection of several gets a tick more.
func peerTimeout(t rtrs.Timing) time.Duration {
	return time.Duration(t.HeartbeatMisses+3) * t.Heartbeat
}

// fabricNames are the fabrics that work in this build.
func fabricNames() (names []string) {
	for n := range fabrics {
		if n == "ibverbs" && !ibverbs.Built {
			n += " (not built in: needs cgo and the headers of rdma-core)"
		}
		names = append(names, n)
	}
	sort.Strings(names)
	return names
}

// openFabrics opens every provider of this build.
func openFabrics(c fabricConfig) (map[string]verbs.Device, error) {
	devs := map[string]verbs.Device{}
	for name, open := range fabrics {
		c.Logger = c.Logs.Logger(name)
		d, err := open(c)
		if err != nil {
			return nil, fmt.Errorf("fabric %s: %w", name, err)
		}
		devs[name] = d
	}
	selfstats.Count(selfstats.PayloadCopied, func() uint64 { return verbs.PlacedByCopy(devs) })
	return devs, nil
}

// cutFabric splits "fabric://rest"; without a fabric it is the default's.
func cutFabric(s string) (fabric, rest string) {
	if f, r, ok := strings.Cut(s, "://"); ok {
		return f, r
	}
	return defaultFabric, s
}
