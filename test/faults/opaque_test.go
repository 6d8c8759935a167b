package faults

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// TestAnOpaquePluginThatIsGivenUp kills a plugin with opaque names, not files,
// until it is given up: the client says so, and a reset of the plugin leads
// back.
func TestAnOpaquePluginThatIsGivenUp(t *testing.T) {
	l := lab.New(t)
	s := memoryServer(l, l.Image("disk.img", 1<<20), "--crash-limit", "2", "--crash-window", "1h")
	c := l.Client(lab.ClientOptions{})
	mem := l.Map(c, "mem0", s)
	n := mustDial(t, c, mem.Name)
	for pid := 0; ; {
		var p *controlpb.Plugin
		eventually(t, enough, "the plugin runs again, or is given up", func() (ok bool) {
			var err error
			p, err = s.Plugin("memory")
			return err == nil && (p.Pid != 0 && int(p.Pid) != pid || strings.HasPrefix(p.State, "failed"))
		})
		if p.Pid == 0 {
			break
		}
		pid = killPlugin(t, s, "memory")
	}
	eventually(t, enough, "the client says that the device has failed", func() bool {
		d, err := c.Device(mem.Name)
		return err == nil && strings.Contains(d.LastError, "it has failed on the server")
	})
	if _, err := n.ReadAt(make([]byte, 4096), 0); !errors.Is(err, syscall.EIO) {
		t.Errorf("a read gives %v, want EIO", err)
	}
	if out, err := recoverDevice(t, c, mem.Name); err == nil || !strings.Contains(out, "it has failed on the server") {
		t.Errorf("recover says %q and ends with %v, want an error that says why", out, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	if p, err := s.API.ResetPlugin(ctx, &controlpb.PluginRequest{Name: "memory"}); err != nil || p.State != "running" {
		t.Fatalf("reset: %v, %v", p, err)
	}
	if _, err := n.ReadAt(make([]byte, 4096), 0); !errors.Is(err, syscall.EIO) {
		t.Errorf("what was written is lost, and a read gives %v after the reset alone", err)
	}
	if out, err := recoverDevice(t, c, mem.Name); err != nil {
		t.Fatalf("recover after the reset: %q, %v", out, err)
	}
	if _, err := n.WriteAt(make([]byte, 4096), 0); err != nil {
		t.Errorf("a write after the recovery: %v", err)
	}
	if d, err := c.Device(mem.Name); err != nil || d.State != "open" || d.LastError != "" {
		t.Errorf("the client says %v, %v", d, err)
	}
	if got := serverDevice(t, s, "mem0").State; got != "open" {
		t.Errorf("the server says the device is %q", got)
	}
}

// recoverDevice runs the command recover and returns its output.
func recoverDevice(t *testing.T, c *lab.Client, device string) (string, error) {
	t.Helper()
	bin, err := lab.Bin()
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), filepath.Join(bin, "rnbd"), "--socket", c.Socket, "device", "recover", device).CombinedOutput()
	return string(out), err
}
