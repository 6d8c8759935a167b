package server

import (
	"net/netip"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

func TestClientHostIsTakenFromTheSessionsName(t *testing.T) {
	paths := []rtrs.SrvPathInfo{{Client: netip.MustParseAddrPort("10.0.0.2:4711")}}
	for name, want := range map[string]string{
		"web1-3fa2@10-0-0-1:1234":    "web1",
		"web1-3fa2@[fd00--1]:1234":   "web1",
		"web1-3fa2@[fd00::1]:1234":   "web1",
		"web1-3fa2@gid:[fd00::1]:99": "web1",
		"web1@storage2":              "web1",
		"web1-3fa2@storage2":         "web1-3fa2",
		"demo":                       "10.0.0.2",
		"@storage2":                  "10.0.0.2",
		"a-b-c-0000@192-0-2-1:65535": "a-b-c",
	} {
		if got := clientHost(name, paths); got != want {
			t.Errorf("the client of %q is %q, want %q", name, got, want)
		}
	}
	if got := clientHost("demo", nil); got != "" {
		t.Errorf("a session without paths has the client %q", got)
	}
}
