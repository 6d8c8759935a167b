package client

import (
	"errors"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// A path that was given as a GID is shown as one, whatever address the fabric uses.
func TestR163_PathsByGID(t *testing.T) {
	const src, dst = "gid:0000:0000:0000:0000:0000:ffff:0a00:0107", "gid:0000:0000:0000:0000:0000:ffff:0a00:0101"
	r := newTreeRig(t)
	must(t, r.write("class/rnbd-client/ctl/map_device", "sessname=s path=ip:10.0.0.7@ip:10.0.0.1 device_path=/dev/vol"))
	add := func(line string) error { return r.write("class/rtrs-client/s/add_path", line) }
	must(t, add("gid:::ffff:10.0.1.7@gid:::ffff:10.0.1.1\n"))
	path := "class/rtrs-client/s/paths/" + src + "@" + dst + "/"
	for file, want := range map[string]string{"src_addr": src, "dst_addr": dst, "state": "connected"} {
		if got := r.read(path + file); got != want+"\n" {
			t.Errorf("%s: %q, want %q", file, got, want)
		}
	}
	if got, want := r.names("kernel/ibtrs_client/s/paths"), dst+" ip:10.0.0.1"; got != want {
		t.Errorf("older folders %q, want %q", got, want)
	}
	list, err := (&controlAPI{c: r.c}).ListSessions(t.Context(), &controlpb.ListRequest{})
	must(t, err)
	if p := list.Sessions[0].Paths[1]; p.Src != src || p.Name != src+"@"+dst || p.Dst != "gid:[0000:0000:0000:0000:0000:ffff:0a00:0101]:1234" {
		t.Errorf("the control API tells of %v", p)
	}
	for line, want := range map[string]error{
		"gid:::ffff:10.0.0.7@gid:::ffff:10.0.0.1": syscall.EEXIST, // the addresses of the first path
		"gid:fe80::1":         syscall.EINVAL,
		"gid:10.0.1.1":        syscall.EINVAL,
		"gid:::ffff:10.9.9.9": syscall.ECONNRESET,
	} {
		if err := add(line); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", line, err, want)
		}
	}
	must(t, r.write(path+"remove_path", "1"))
}

// A session without a name gets one that the server accepts.
func TestSessionNameOfAGID(t *testing.T) {
	r := newTreeRig(t)
	name, err := r.c.sessionName([]string{"gid:::ffff:10.0.0.1"})
	if want := "host-example-" + r.c.token + "@gid:[0000:0000:0000:0000:0000:ffff:0a00:0001]:1234"; err != nil || name != want {
		t.Errorf("%q, %v, want %q", name, err, want)
	}
}
