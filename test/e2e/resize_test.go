package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// resizeTarget is a device of the server and how an administrator changes it.
type resizeTarget struct {
	server lab.ServerOptions
	device string
	resize func(size int64)
}

func fileTarget(t *testing.T, l *lab.T, size int64) resizeTarget {
	dir := l.Image("disk.img", size)
	return resizeTarget{lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}}, "disk.img", func(n int64) {
		t.Helper()
		if err := os.Truncate(filepath.Join(dir, "disk.img"), n); err != nil {
			t.Fatal(err)
		}
	}}
}

func loopTarget(t *testing.T, l *lab.T, size int64) resizeTarget {
	image := filepath.Join(l.Image("disk.img", size), "disk.img")
	loop := loopDevice(t, image)
	return resizeTarget{lab.ServerOptions{Plugins: []string{"blockio"}}, loop, func(n int64) {
		t.Helper()
		if err := os.Truncate(image, n); err != nil {
			t.Fatal(err)
		}
		run(t, "losetup", "-c", loop)
	}}
}

// loopDevice puts a loop device over image until the end of the test.
func loopDevice(t *testing.T, image string, args ...string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("loop devices need root")
	}
	loop := strings.TrimSpace(run(t, append([]string{lab.Tool(t, "losetup"), "-f", "--show"}, append(args, image)...)...))
	t.Cleanup(func() { run(t, "losetup", "-d", loop) })
	return loop
}

func TestResizeReachesTheUsers(t *testing.T) {
	const before, larger, smaller = 16 << 20, 48 << 20, 8 << 20
	for name, target := range map[string]func(*testing.T, *lab.T, int64) resizeTarget{
		"a file by truncate": fileTarget, "a loop device by losetup -c": loopTarget,
	} {
		t.Run(name, func(t *testing.T) {
			l := lab.New(t)
			x := target(t, l, before)
			s := l.Server(x.server)
			c := l.Client(lab.ClientOptions{})
			d := l.Map(c, x.device, s)
			uri := c.URI(d.Name)
			old := dialNBD(t, c, d.Name)

			x.resize(larger)
			awaitSize(t, c, d.Name, larger)
			run(t, "qemu-io", "-f", "raw", "-c", fmt.Sprintf("write -P 7 %d 64k", larger-65536), "-c", "flush", uri)
			if list := run(t, filepath.Join(l.Bin, "rnbd"), "client", "device", "list", "--socket", c.Socket, "+size", "M"); !strings.Contains(list, "48") {
				t.Errorf("the list does not show 48 MiB:\n%s", list)
			}
			if said := run(t, filepath.Join(l.Bin, "rnbd"), "server", "device", "resize", "--socket", s.Socket, "--verbose", x.device); !strings.Contains(said, fmt.Sprint(larger)) {
				t.Errorf("rnbd server device resize says %q", said)
			}

			x.resize(smaller)
			awaitSize(t, c, d.Name, smaller)
			buf := make([]byte, 4096)
			if _, err := old.WriteAt(buf, smaller); err == nil {
				t.Error("an old connection writes behind the new end")
			}
			if _, err := old.WriteAt(buf, smaller-4096); err != nil {
				t.Errorf("an old connection writes in front of the new end: %v", err)
			}
		})
	}
}

// awaitSize waits until the client and new connections see a size.
func awaitSize(t *testing.T, c *lab.Client, device string, want uint64) {
	t.Helper()
	eventually(t, fmt.Sprintf("the device has %d bytes", want), func() bool {
		d, err := c.Device(device)
		return err == nil && d.Limits.Size == want
	})
	eventually(t, fmt.Sprintf("a new connection sees %d bytes", want), func() bool {
		return strings.TrimSpace(run(t, "nbdinfo", "--size", c.URI(device))) == fmt.Sprint(want)
	})
}
