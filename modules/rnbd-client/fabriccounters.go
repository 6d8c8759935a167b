package client

import (
	"maps"
	"slices"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// devices are the fabrics, by name.
func (c *Config) devices() (out []verbs.Device) {
	for _, name := range slices.Sorted(maps.Keys(c.Fabrics)) {
		out = append(out, c.Fabrics[name])
	}
	return out
}

// fabricCounters are what the devices count that count at all.
func fabricCounters(devices []verbs.Device) (out []*controlpb.FabricCounter) {
	for _, d := range devices {
		source, ok := d.(verbs.CounterSource)
		if !ok {
			continue
		}
		for _, c := range source.Counters() {
			out = append(out, &controlpb.FabricCounter{
				Fabric: d.Info().Fabric, Name: c.Name, Reason: c.Reason, Bytes: c.Bytes, Value: c.Value,
			})
		}
	}
	return out
}
