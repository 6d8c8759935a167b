package server

import (
	"context"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// info returns what the plugin says of itself; it is empty while no process has run.
func (p *ioPlugin) info() plugin.Info {
	if told := p.told.Load(); told != nil {
		return *told
	}
	return plugin.Info{}
}

// described is info that waits for the first process of the plugin.
func (p *ioPlugin) described(ctx context.Context) (plugin.Info, error) {
	if p.told.Load() == nil {
		if _, err := p.sup.Await(ctx); err != nil {
			return plugin.Info{}, err
		}
	}
	return p.info(), nil
}

// opaqueID is the identity of a disk that a plugin makes of a name.
func opaqueID(p *ioPlugin, name string) nodeID { return nodeID{opaque: p.cfg.Name + ":" + name} }
