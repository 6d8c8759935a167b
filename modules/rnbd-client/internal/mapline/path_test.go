package mapline

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"
)

func TestParsePath(t *testing.T) {
	for _, c := range []struct {
		in       string
		src, dst string
		fabric   string
	}{
		{"10.0.0.1", "", "10.0.0.1:1234", ""},
		{"10.0.0.1:99", "", "10.0.0.1:99", ""},
		{"10.0.0.2@10.0.0.1", "10.0.0.2", "10.0.0.1:1234", ""},
		{"ip:10.0.0.2,ip:10.0.0.1", "10.0.0.2", "10.0.0.1:1234", ""},
		{"10.0.0.2@10.0.0.1:7%rocev2", "10.0.0.2", "10.0.0.1:7", "rocev2"},
		{"fe80::1", "", "[fe80::1]:1234", ""},
		{"[fe80::1]:9%iwarp", "", "[fe80::1]:9", "iwarp"},
		{"::2@[::1]:9", "::2", "[::1]:9", ""},
		{"[fe80::1%eth0]", "", "[fe80::1%eth0]:1234", ""},
		{"[fe80::1%eth0]:9", "", "[fe80::1%eth0]:9", ""},
		{"[fe80::1%eth0]%iwarp", "", "[fe80::1%eth0]:1234", "iwarp"},
		{"[fe80::1%eth0.7]:9%iwarp", "", "[fe80::1%eth0.7]:9", "iwarp"},
		{"[fe80::2%a@b]@[fe80::1%a@b]%rocev2", "fe80::2%a@b", "[fe80::1%a@b]:1234", "rocev2"},
		{"ip:[fe80::2%eth0],ip:[fe80::1%eth0]", "fe80::2%eth0", "[fe80::1%eth0]:1234", ""},
		{"gid:fe80::1", "", "[fe80::1%gid:]:1234", ""},
		{"gid:fe80::2@gid:[fe80::1]:9%ibverbs", "fe80::2%gid:", "[fe80::1%gid:]:9", "ibverbs"},
		{"gid:::ffff:10.0.0.1", "", "[::ffff:10.0.0.1%gid:]:1234", ""},
	} {
		p, err := ParsePath(c.in)
		if err != nil {
			t.Errorf("%s: %v", c.in, err)
			continue
		}
		var src netip.Addr
		if c.src != "" {
			src = netip.MustParseAddr(c.src)
		}
		if want := (Path{src, netip.MustParseAddrPort(c.dst), c.fabric}); p != want {
			t.Errorf("%s: got %+v, want %+v", c.in, p, want)
		}
		if again, err := ParsePath(p.String()); err != nil || again != p {
			t.Errorf("%s is spelled %s, which is %+v, %v", c.in, p, again, err)
		}
	}
	for _, in := range []string{"", "host", "10.0.0.1:0", "10.0.0.1:65536", "10.0.0.1%", "@10.0.0.1", "::1@10.0.0.1", "10.0.0.1:x", "1.2.3.4@", "10.0.0.1@10.0.0.2@10.0.0.3",
		"[fe80::1%]", "[fe80::1%gid:]", "[fe80::1%a/b]", "[fe80::1%eth0", "gid:[fe80::1%eth0]", "[10.0.0.1%eth0]", "fe80::1%", "[fe80::1%eth0]%",
		"[10.0.0.1", "10.0.0.1]:5", "[::1", "gid:10.0.0.1", "gid:ip:fe80::1", "gid:", "fe80::2@gid:fe80::1", "gid:fe80::2@fe80::1"} {
		if p, err := ParsePath(in); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%q: got %+v, %v; want EINVAL", in, p, err)
		}
	}
}
