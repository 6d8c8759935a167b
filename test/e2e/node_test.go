package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// A block device may be named by a link to it, as those of /dev/disk/by-id are.
func TestADeviceIsFoundByALink(t *testing.T) {
	l := lab.New(t)
	loop := loopDevice(t, filepath.Join(l.Image("disk.img", 8<<20), "disk.img"))
	link := filepath.Join(l.Dir, "by-id")
	if err := os.Symlink(loop, link); err != nil {
		t.Fatal(err)
	}
	s := l.Server(lab.ServerOptions{Plugins: []string{"blockio"}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, link, s)
	if d.Limits.Size != 8<<20 {
		t.Errorf("size %d", d.Limits.Size)
	}
	queue := filepath.Join("/sys/block", filepath.Base(loop), "queue")
	for name, got := range map[string]string{
		"rotational":  fmt.Sprint(map[bool]int{true: 1}[d.Limits.Rotational]),
		"write_cache": map[bool]string{true: "write back", false: "write through"}[d.Limits.WriteCache],
		"fua":         fmt.Sprint(map[bool]int{true: 1}[d.Limits.Fua]),
	} {
		want, err := os.ReadFile(filepath.Join(queue, name))
		if err != nil {
			t.Fatal(err)
		}
		if got != strings.TrimSpace(string(want)) {
			t.Errorf("%s: the client has %s, the device %s", name, got, want)
		}
	}
}
