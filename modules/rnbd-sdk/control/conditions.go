package control

import (
	"fmt"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// Kinds of conditions. `rnbd explain` describes each.
const (
	RequestsHang   = "requests-hang"
	RequestsFailed = "requests-failed"
	RedundancyLost = "redundancy-lost"
	ServerAway     = "server-away"
	DeviceClosed   = "device-closed"
	DeviceFailed   = "device-failed"
	PluginDown     = "plugin-down"
	AuditLost      = "audit-lost"
	ConfigProblem  = "config-problem"
)

// ConditionKinds are all kinds of conditions.
var ConditionKinds = []string{
	RequestsHang, RequestsFailed, RedundancyLost, ServerAway, DeviceClosed, DeviceFailed, PluginDown, AuditLost, ConfigProblem,
}

// maxConditions bounds a list of conditions.
const maxConditions = 256

// Conditions is the list of what needs attention in a daemon now: the one list that
// commands, pages and metrics show.
type Conditions struct{ List []*controlpb.Condition }

// Add adds a condition of a subject: the name of a device, session or plugin.
func (c *Conditions) Add(kind, subject, text string) {
	if len(c.List) < maxConditions {
		c.List = append(c.List, &controlpb.Condition{Kind: kind, Subject: subject, Text: text})
	}
}

// AddPlugins adds the plugins that do not run.
func (c *Conditions) AddPlugins(all []*controlpb.Plugin) {
	for _, p := range all {
		if p.State != "running" {
			c.Add(PluginDown, p.Name, p.State)
		}
	}
}

// AddRequests adds the requests of a device that hang, and the last one that failed,
// empty for none.
func (c *Conditions) AddRequests(device string, hung []*controlpb.HungRequests, failure string) {
	for _, h := range hung {
		age := time.Duration(h.OldestNs).Round(time.Second)
		c.Add(RequestsHang, device, strings.TrimSpace(fmt.Sprintf("%d for up to %s, stage %s %s", h.Count, age, h.Stage, h.Path)))
	}
	if failure != "" {
		c.Add(RequestsFailed, device, failure)
	}
}

// AddSessions adds the sessions of a client that lack paths.
func (c *Conditions) AddSessions(all []*controlpb.Session) {
	for _, s := range all {
		up, why := 0, ""
		for _, p := range s.Paths {
			if p.State == "connected" {
				up++
			} else if why == "" {
				why = p.Name + " is " + p.State
				if p.LastError != "" {
					why += ": " + p.LastError
				}
			}
		}
		switch {
		case up == 0:
			c.Add(ServerAway, s.Name, fmt.Sprintf("none of %d paths is connected; %s", len(s.Paths), why))
		case up < len(s.Paths):
			c.Add(RedundancyLost, s.Name, fmt.Sprintf("%d of %d paths are connected; %s", up, len(s.Paths), why))
		}
	}
}
