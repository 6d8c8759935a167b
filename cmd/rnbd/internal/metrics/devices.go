package metrics

import (
	"context"
	"fmt"
	"strings"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// States of devices and plugins: the first words of what the control API says.
var (
	clientDeviceStates = []string{"init", "open", "closed", "unmapped"}
	serverDeviceStates = []string{"open", "recovering", "stuck", "failed"}
	pluginStates       = []string{"running", "restarting", "failed"}
)

// Stages in which requests can hang.
var (
	clientStages = []string{"queue", "wire"}
	serverStages = []string{"queue", "plugin", "fence", "turn"}
)

// addState adds a series for each state, 1 for the one that now begins with.
func (b *batch) addState(m metric, states []string, now string, labels ...string) {
	word, _, _ := strings.Cut(now, ":")
	for _, s := range states {
		b.add(m, flag(s == word), append(labels[:len(labels):len(labels)], s)...)
	}
}

// allDevices adds what is known of devices.
func (c *Daemon) allDevices(ctx context.Context, b *batch) error {
	devices, err := c.devices(ctx)
	if err != nil {
		return fmt.Errorf("devices: %w", err)
	}
	var names []string
	for _, d := range devices {
		names = append(names, d.name)
	}
	name := bounded(names)
	seen := map[string]bool{}
	for i := range devices {
		d := &devices[i]
		label := name(d.name)
		if !seen[d.name] { // a server has one opened twice, for readers apart
			c.deviceOnce(b, d, label)
			b.add(c.deviceLosses, d.losses, label)
		}
		seen[d.name] = true
		b.add(c.deviceRead, 512*float64(d.rx), label)
		b.add(c.deviceWritten, 512*float64(d.tx), label)
		b.add(c.deviceUse, d.users, label)
		b.add(c.deviceRun, d.inflight, label)
		c.mappings(b, d, label)
	}
	stats, err := c.api.DeviceStats(ctx, &controlpb.DeviceRequest{})
	if err != nil {
		return fmt.Errorf("statistics of devices: %w", err)
	}
	c.deviceStats(b, stats.Devices, name)
	return nil
}

// deviceOnce adds the series of a device that are not sums over its uses.
func (c *Daemon) deviceOnce(b *batch, d *device, label string) {
	states, stages := clientDeviceStates, clientStages
	if !c.client {
		states, stages = serverDeviceStates, serverStages
	}
	b.add(c.deviceOpen, flag(d.state == "open"), label)
	b.add(c.deviceSize, float64(d.size), label)
	b.addState(c.deviceState, states, d.state, label)
	b.add(c.deviceOldest, 0, label)
	for _, s := range stages {
		b.add(c.deviceHung, 0, label, s)
	}
}

// maxInfos bounds the series of rnbd_device_info. Those beyond it are left out.
const maxInfos = 4 * maxNames

// mappings adds the names of the uses of a device.
func (c *Daemon) mappings(b *batch, d *device, label string) {
	for _, m := range d.mappings {
		if label != other && b.infos < maxInfos {
			b.infos++
			b.set(c.deviceInfo, 1, label, m.session, m.path, b.servers[m.session])
		}
	}
}

// deviceStats adds the latencies of devices, and the requests that failed or
// hang.
func (c *Daemon) deviceStats(b *batch, devices []*controlpb.DeviceStats, name func(string) string) {
	seen := map[string]bool{}
	for _, d := range devices {
		label := name(d.Device)
		for _, s := range d.Stages {
			b.addHistogram(c.latency, control.Latency(s.Latency), label, s.Stage, s.Op)
		}
		for _, f := range d.Failed {
			b.add(c.deviceFailed, float64(f.Count), label, f.Stage, f.Errno)
		}
		if seen[d.Device] {
			continue // what hangs is counted by name
		}
		seen[d.Device] = true
		for _, h := range d.Hung {
			b.add(c.deviceHung, float64(h.Count), label, h.Stage)
			b.atLeast(c.deviceOldest, float64(h.OldestNs)/1e9, label)
		}
	}
}
