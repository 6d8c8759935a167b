package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
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

// A server that is not told what to export exports no block device, and a device in use on
// its host is refused, unless the server is told otherwise. One that is mapped for writing
// cannot be mounted on the server's host.
func TestBlockDevices_OfTheServersHost(t *testing.T) {
	l := lab.New(t)
	loop := loopDevice(t, filepath.Join(l.Image("disk.img", 8<<20), "disk.img"))
	if out, err := exec.Command("mkfs.ext4", "-q", loop).CombinedOutput(); err != nil {
		t.Skipf("mkfs.ext4: %v: %s", err, out)
	}
	c := l.Client(lab.ClientOptions{})
	plugins := []string{"blockio"}
	none := l.Server(lab.ServerOptions{Plugins: plugins, Extra: []string{"--block-devices", "/dev/none"}, NoBlockDevices: true})
	refused := func(s *lab.Server, mode, why string) {
		t.Helper()
		_, err := c.Map(loop, s, func(r *controlpb.MapRequest) { r.AccessMode = mode })
		if err == nil {
			t.Errorf("%s is mapped %s", loop, mode)
		}
		t.Log(err)
		if !strings.Contains(s.Log(), why) {
			t.Errorf("the server's log lacks %q", why)
		}
	}
	refused(none, "ro", "none of the server's --block-devices")
	all := l.Server(lab.ServerOptions{Plugins: plugins})
	dir := t.TempDir()
	mount := func() error { return unix.Mount(loop, dir, "ext4", 0, "") }
	if err := mount(); err != nil {
		t.Skipf("mount: %v", err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	refused(all, "rw", "mounted on this host")
	refused(all, "ro", "mounted on this host")
	forced := l.Server(lab.ServerOptions{Plugins: plugins, Extra: []string{"--serve-in-use"}})
	if err := c.Unmap(l.Map(c, loop, forced).Name, true); err != nil {
		t.Fatal(err)
	}
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatal(err)
	}
	d := l.Map(c, loop, all)
	if err := mount(); err != unix.EBUSY {
		t.Errorf("mount of a device that a client writes to: %v", err)
	}
	if err := c.Unmap(d.Name, true); err != nil {
		t.Fatal(err)
	}
	sdktest.Eventually(t, "the device can be mounted again", func() bool { return mount() == nil })
}
