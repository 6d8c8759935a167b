package rtrs

import (
	"net/netip"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Addresses, state and counts of a path, as users see them.

// PathInfo describes a path.
type PathInfo struct {
	ID     int
	Addr   PathAddr
	Src    netip.Addr // in use, or that of the last connection
	Fabric string
	Device string // in use, or that of the last connection; before the first, that of Addr
	Port   int    // of Device
	State  PathState
	// Security is how the path is protected; zero: not at all, or not connected.
	Security verbs.Security
	Err      error // why the path is not connected, nil if that was asked for
	Stats    PathStats
}

func (p *path) pathInfo() PathInfo {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := PathInfo{
		ID: p.id, Addr: p.addr, Src: p.addr.Src, Fabric: p.addr.Device.Info().Fabric,
		State: p.state, Err: p.err, Stats: p.currentDetails().PathStats,
	}
	if p.current != nil {
		i.Security = p.current.linkSecurity()
	}
	dev := p.addr.Device.Info()
	if p.lastDev != nil {
		dev = p.lastDev.Info()
	}
	i.Device, i.Port = dev.Name, dev.Port
	if p.lastSrc.IsValid() {
		i.Src = p.lastSrc
	}
	return i
}

// totalDetails returns all counts since the path was made. The caller holds mu.
func (p *path) totalDetails() (d PathDetails) {
	d.addCounts(&p.stats)
	d.Failovers = p.failovers.Load()
	if l := p.current; l != nil {
		l.addDetails(&d)
		d.Latency = l.hb.lastLatency()
	}
	return d
}

// currentDetails returns the counts since the last resets. The caller holds mu.
func (p *path) currentDetails() PathDetails {
	d := p.totalDetails()
	d.subtractCounts(&p.base)
	return d
}

// resetStats sets the given counts to zero.
func (p *path) resetStats(kinds StatKind) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.totalDetails()
	p.base.resetKinds(kinds, &now)
}
