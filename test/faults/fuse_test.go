package faults

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// TestFuseLoop_ProcessesAreKilledUnderLoad kills one process after the other below a disk
// of the front end fuse-loop, and upgrades the client. No request of fio fails, and fio
// finds what it has written.
func TestFuseLoop_ProcessesAreKilledUnderLoad(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to make loop devices")
	}
	for _, node := range []string{"/dev/fuse", "/dev/loop-control"} {
		if _, err := os.Stat(node); err != nil {
			t.Skip("no such device here: ", err)
		}
	}
	fio := lab.Tool(t, "fio")
	for name, strike := range map[string]func(*lab.Server, *lab.Client) error{
		"front end": func(_ *lab.Server, c *lab.Client) error { return c.KillPlugin("fuse") },
		"client upgrade": func(_ *lab.Server, c *lab.Client) error {
			_, err := c.Upgrade("")
			return err
		},
		"server": func(s *lab.Server, _ *lab.Client) error {
			if err := s.Kill(); err != nil {
				return err
			}
			return s.Start()
		},
		"storage plugin": func(s *lab.Server, _ *lab.Client) error { return s.KillPlugin("fileio") },
	} {
		t.Run(name, func(t *testing.T) {
			l := lab.New(t)
			s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 32<<20), Plugins: []string{"fileio"}, Extra: []string{"--crash-limit", "100"}})
			c := l.Client(lab.ClientOptions{Extra: []string{"--fuse-dir", filepath.Join(l.Dir, "disks")}})
			d := l.Map(c, "disk.img", s, withLoss("queue:60s"), func(r *controlpb.MapRequest) { r.Frontend = "fuse-loop" })
			defer func() { _ = c.Unmap(d.Name, true) }()
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
			defer cancel()
			load := exec.CommandContext(ctx, fio, "--name=load", "--filename="+d.Endpoint, "--rw=randwrite", "--bs=4k", "--iodepth=16", "--ioengine=libaio",
				"--direct=1", "--size=32m", "--verify=crc32c", "--verify_backlog=256", "--time_based", "--runtime=600")
			var out bytes.Buffer
			load.Stdout, load.Stderr = &out, &out
			if err := load.Start(); err != nil {
				t.Fatal(err)
			}
			for range pick(2, 50) {
				awaitWritten(t, c, d.Name, 2<<20)
				if err := strike(s, c); err != nil {
					t.Fatal(err)
				}
			}
			awaitWritten(t, c, d.Name, 2<<20)
			if err := load.Process.Signal(os.Interrupt); err != nil {
				t.Error(err)
			}
			_ = load.Wait() // it was interrupted
			if !bytes.Contains(out.Bytes(), []byte("err= 0:")) || bytes.Contains(out.Bytes(), []byte("verify:")) {
				t.Errorf("fio:\n%s", out.String())
			}
			if err := c.Unmap(d.Name, false); err != nil {
				t.Error(err)
			}
		})
	}
}

// awaitWritten waits until users of the device have written so many bytes more.
func awaitWritten(t *testing.T, c *lab.Client, device string, bytes uint64) {
	t.Helper()
	var first uint64
	seen := false
	eventually(t, enough, "users of the device write", func() bool {
		d, err := c.Device(device)
		if err != nil {
			return false
		}
		if !seen || d.TxSectors < first { // the client is another process
			first, seen = d.TxSectors, true
		}
		return (d.TxSectors-first)*512 >= bytes
	})
}
