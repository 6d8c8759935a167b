package control

import (
	"fmt"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func TestConditions(t *testing.T) {
	path := func(state, err string) *controlpb.Path {
		return &controlpb.Path{Name: "10.0.0.1@10.0.0.2", State: state, LastError: err}
	}
	var c Conditions
	c.AddPlugins([]*controlpb.Plugin{{Name: "nbd", State: "running"}, {Name: "ublk", State: "restarting"}})
	c.AddSessions([]*controlpb.Session{
		{Name: "whole", Paths: []*controlpb.Path{path("connected", ""), path("connected", "")}},
		{Name: "half", Paths: []*controlpb.Path{path("connected", ""), path("reconnecting", "no route")}},
		{Name: "away", Paths: []*controlpb.Path{path("closed", "")}},
	})
	c.AddRequests("vol", []*controlpb.HungRequests{{Stage: "wire", Path: "p", Count: 3, OldestNs: 15e9}}, "write: EIO")
	c.AddRequests("good", nil, "")
	var got []string
	for _, one := range c.List {
		got = append(got, one.Kind+" "+one.Subject+": "+one.Text)
	}
	want := `plugin-down ublk: restarting
redundancy-lost half: 1 of 2 paths are connected; 10.0.0.1@10.0.0.2 is reconnecting: no route
server-away away: none of 1 paths is connected; 10.0.0.1@10.0.0.2 is closed
requests-hang vol: 3 for up to 15s, stage wire p
requests-failed vol: write: EIO`
	if text := strings.Join(got, "\n"); text != want {
		t.Errorf("got\n%s\nwant\n%s", text, want)
	}
	for i := range 2 * maxConditions {
		c.Add(DeviceClosed, fmt.Sprint(i), "")
	}
	if len(c.List) != maxConditions {
		t.Errorf("%d conditions", len(c.List))
	}
}
