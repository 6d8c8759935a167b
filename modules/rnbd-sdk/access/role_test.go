package access

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

func TestAdministrators(t *testing.T) {
	r, err := New([]Rule{
		{Identity: []string{"cn:root"}, Address: []string{"10.0.0.0/24"}, Role: RoleAdmin},
		{Identity: []string{"spiffe://x/csi/*"}, Role: RoleVolumes, QuotaBytes: 1 << 40},
		{Identity: []string{"spiffe://x/**"}, Role: RoleRead},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ identity, addr, want string }{
		{"cn:root", "10.0.0.7", RoleAdmin},
		{"cn:root", "::ffff:10.0.0.7", RoleAdmin},
		{"cn:root", "10.0.1.7", ""},
		{"spiffe://x/csi/a", "192.0.2.1", RoleVolumes},
		{"spiffe://x/csi/a/b", "192.0.2.1", RoleRead},
		{"spiffe://y/csi/a", "192.0.2.1", ""},
		{"", "10.0.0.7", ""},
	} {
		a, ok := r.Administrator(c.identity, netip.MustParseAddr(c.addr))
		if a.Role != c.want || ok != (c.want != "") || a.Role == RoleVolumes && a.QuotaBytes != 1<<40 {
			t.Errorf("%s from %s: %+v, want %q", c.identity, c.addr, a, c.want)
		}
	}
	if _, ok := (*Rules)(nil).Administrator("cn:root", netip.MustParseAddr("10.0.0.7")); ok {
		t.Error("without rules there is an administrator")
	}
}

// Rules with a role say nothing about devices.
func TestRolesAreNoRulesOfDevices(t *testing.T) {
	role := Rule{Identity: []string{"cn:root"}, Role: RoleAdmin}
	client := Client{Identities: []string{"cn:root"}}
	only, err := New([]Rule{role})
	if err != nil {
		t.Fatal(err)
	}
	if d := only.Decide(client, "d", blk.ReadWrite); !d.Allowed {
		t.Errorf("with roles only: %+v", d)
	}
	both, err := New([]Rule{role, {Identity: []string{"cn:web"}, Allow: "rw"}})
	if err != nil {
		t.Fatal(err)
	}
	if d := both.Decide(client, "d", blk.ReadOnly); d.Allowed || d.Rule != 0 {
		t.Errorf("an administrator is no client: %+v", d)
	}
	if d := both.Decide(Client{Identities: []string{"cn:web"}}, "d", blk.ReadWrite); !d.Allowed || d.Rule != 2 {
		t.Errorf("the number of a rule counts all: %+v", d)
	}
}

func TestRulesWithWrongRoles(t *testing.T) {
	for want, w := range map[string]Rule{
		"write read, volumes or admin": {Identity: []string{"cn:a"}, Role: "root"},
		"needs an identity":            {Role: RoleRead},
		"has identity and address":     {Identity: []string{"cn:a"}, Role: RoleRead, Allow: "ro"},
		"without the role":             {Identity: []string{"cn:a"}, Allow: "ro", QuotaBytes: 1},
		"for the role volumes":         {Identity: []string{"cn:a"}, Role: RoleAdmin, QuotaBytes: 1},
		"none, ro, rw or migration":    {Identity: []string{"cn:a"}},
	} {
		if _, err := New([]Rule{w}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", w, err, want)
		}
	}
}
