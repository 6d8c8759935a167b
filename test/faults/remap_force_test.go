package faults

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// TestRemapByForceWhileTheDiskHangs remaps a device of the configuration by force while
// a write hangs in its disk. The device is listed until the disk answers again, and is
// there then, also if the client daemon is started anew in between.
func TestRemapByForceWhileTheDiskHangs(t *testing.T) {
	for _, restarts := range []bool{false, true} {
		t.Run(fmt.Sprintf("restart %t", restarts), func(t *testing.T) {
			disk := slowdisk.New(t, 1<<20)
			l := lab.New(t)
			s := l.Server(lab.ServerOptions{SearchPath: filepath.Dir(disk.Path()), Plugins: []string{"fileio"}})
			c := l.Client(lab.ClientOptions{Extra: []string{"--config-dir", keepOne(t, l, s, filepath.Base(disk.Path()))}})
			awaitOpen(t, c, 1)
			conn, err := dialDevice(c, "d0")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			disk.HoldWrites()
			defer disk.Release()
			ended := make(chan error, 1)
			go func() { _, err := conn.WriteAt(make([]byte, loadBlock), 0); ended <- err }()
			disk.WaitHeld(1)

			_, err = c.API.Remap(t.Context(), &controlpb.RemapRequest{Device: "d0", Force: true})
			t.Logf("remap: %v", err)
			if err := <-ended; err == nil {
				t.Error("the write of the user that lost its device has succeeded")
			}
			if restarts {
				if err := c.Stop(); err != nil {
					t.Fatal(err)
				}
				if err := c.Start(); err != nil {
					t.Fatal(err)
				}
			} else if d, err := c.Device("d0"); err != nil || d.State != "closed" && d.State != "open" {
				t.Errorf("the device is %v, %v", d, err)
			}
			disk.Release()
			awaitOpen(t, c, 1)
			conn, err = dialDevice(c, "d0")
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if _, err := conn.WriteAt([]byte(strings.Repeat("x", loadBlock)), 0); err != nil {
				t.Errorf("write: %v", err)
			}
		})
	}
}

// keepOne writes a configuration that maps the device as d0, and returns its folder.
func keepOne(t *testing.T, l *lab.T, s *lab.Server, device string) string {
	t.Helper()
	folder := filepath.Join(l.Dir, "client.d")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("mappings:\n  - {device: %q, server: [%q], name: d0, session: s, loss: \"queue:1m\"}\n", device, s.Addrs[0])
	if err := os.WriteFile(filepath.Join(folder, "all.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return folder
}
