package client

import (
	"os"
	"path/filepath"
	"testing"
)

func TestParseMount(t *testing.T) {
	for _, c := range []struct {
		line, path, source string
		ok                 bool
	}{
		{`40 30 0:52 / /run/a\040b/disk\134x rw,nosuid - fuse.rnbd-device rnbd:77 rw,user_id=0`, `/run/a b/disk\x`, "rnbd:77", true},
		{`40 30 0:52 / /run/disk rw shared:1 - fuse.rnbd-device rnbd:77 rw`, "/run/disk", "rnbd:77", true},
		{`40 30 0:52 / /run/disk rw - fuse.other rnbd:77 rw`, "", "", false},
		{`40 30 0:52 / /run/disk rw`, "", "", false},
		{``, "", "", false},
		{` - fuse.rnbd-device`, "", "", false},
	} {
		if path, source, ok := parseMount(c.line); path != c.path || source != c.source || ok != c.ok {
			t.Errorf("%q: %q, %q, %v", c.line, path, source, ok)
		}
	}
}

func TestMountPoint_HidesNoFile(t *testing.T) {
	m := &mountedFile{path: filepath.Join(t.TempDir(), "disk")}
	for range 2 { // the second time the empty file of an earlier mount is there
		if err := m.makeMountPoint(); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(m.path, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := m.makeMountPoint(); err == nil {
		t.Error("a mount would hide a file with content")
	}
}
