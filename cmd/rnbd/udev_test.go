package main

import (
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

func TestUdevIsToldByLines(t *testing.T) {
	for _, v := range []struct{ session, path, want string }{
		{"web1@10-0-0-1", "vg0/lv1", `RNBD_DEVICE=rnbd0
RNBD_SESSION=web1@10-0-0-1
RNBD_PATH=vg0/lv1
RNBD_LINK=web1@10-0-0-1/vg0!lv1
`},
		{"a/b", "/dev/x y", `RNBD_DEVICE=rnbd0
RNBD_SESSION=a/b
RNBD_PATH=/dev/x\x20y
RNBD_LINK=a!b/!dev!x\x20y
`},
		{"s", "x\nRNBD_LINK=etc/passwd", `RNBD_DEVICE=rnbd0
RNBD_SESSION=s
RNBD_PATH=x\x0aRNBD_LINK=etc/passwd
RNBD_LINK=s/x\x0aRNBD_LINK=etc!passwd
`},
		{"s", "\"d\u00fcnn\" \xff%k$\\", `RNBD_DEVICE=rnbd0
RNBD_SESSION=s
RNBD_PATH=\x22d\u00fcnn\x22\x20\xff\x25k\x24\x5c
RNBD_LINK=s/\x22d\u00fcnn\x22\x20\xff\x25k\x24\x5c
`},
	} {
		var b strings.Builder
		err := printUdev(&b, &controlpb.ClientDevice{Name: "rnbd0", Session: v.session, Path: v.path})
		if want := strings.ReplaceAll(v.want, `\u00fc`, "\u00fc"); err != nil || b.String() != want {
			t.Errorf("%q: got\n%swant\n%s%v", v.path, b.String(), want, err)
		}
	}
}
