package e2e

import (
	"path/filepath"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// The client's wish for an io mode comes before the server's choice; a device
// that is open in one is not opened in another.
func TestE014_E016_E017_TheClientChoosesTheIOMode(t *testing.T) {
	l := lab.New(t)
	loop := loopDevice(t, filepath.Join(l.Image("disk.img", 8<<20), "disk.img"))
	s := l.Server(lab.ServerOptions{Plugins: []string{"blockio", "fileio"}})
	c := l.Client(lab.ClientOptions{})
	mode := func() string {
		t.Helper()
		devices, err := s.API.ListDevices(t.Context(), &controlpb.ListRequest{})
		if err != nil || len(devices.Devices) != 1 {
			t.Fatalf("devices %v, error %v", devices, err)
		}
		return devices.Devices[0].IoMode
	}
	for wish, want := range map[string]string{"": "blockio", "fileio": "fileio", "blockio": "blockio"} {
		d := l.Map(c, loop, s, func(r *controlpb.MapRequest) { r.IoMode = wish })
		if got := mode(); got != want {
			t.Errorf("wish %q: opened by %s, want %s", wish, got, want)
		}
		run(t, "qemu-io", "-f", "raw", "-c", "write -P 7 4k 64k", "-c", "write -z 8k 4k", "-c", "flush", "-c", "read -P 0 8k 4k",
			"-c", "read -P 7 12k 56k", "-c", "discard 1M 1M", c.URI(d.Name))
		if wish == "fileio" {
			other := l.Client(lab.ClientOptions{})
			r := &controlpb.MapRequest{Path: loop, Paths: s.Addrs, AccessMode: "migration", IoMode: "blockio"}
			if _, err := other.API.Map(t.Context(), r); status.Code(err) == codes.OK {
				t.Error("a device that is open as fileio was opened as blockio")
			}
			r.IoMode = ""
			if _, err := other.API.Map(t.Context(), r); err != nil {
				t.Errorf("without a wish: %v", err)
			}
			if err := other.Stop(); err != nil {
				t.Error(err)
			}
		}
		eventually(t, "qemu-io has left and the device is unmapped", func() bool { return c.Unmap(d.Name, false) == nil })
	}
}
