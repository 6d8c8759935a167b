package e2e

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
	"github.com/rnbd-go/rnbd/test/lab"
)

// fuseRig is a server and a client with the front end fuse.
func fuseRig(t *testing.T) (*lab.T, *lab.Client, *controlpb.ClientDevice) {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skip("no FUSE here: ", err)
	}
	if os.Geteuid() != 0 {
		lab.Tool(t, "fusermount3")
	}
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 64<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--fuse-dir", filepath.Join(t.TempDir(), "disks")}})
	return l, c, l.Map(c, "disk.img", s, withFuse)
}

func withFuse(r *controlpb.MapRequest) { r.Frontend = "fuse" }

// TestFuse_VerifiedWhileTheFrontEndIsKilled runs fio on the file of a device.
func TestFuse_VerifiedWhileTheFrontEndIsKilled(t *testing.T) {
	_, c, d := fuseRig(t)
	fio := lab.Tool(t, "fio")
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	cmd := exec.CommandContext(ctx, fio, "--name=verify", "--filename="+d.Endpoint, "--rw=randwrite", "--bs=4k", "--iodepth=16",
		"--ioengine=libaio", "--direct=1", "--size=16m", "--verify=crc32c", "--time_based", "--runtime=3")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		time.Sleep(time.Second)
		if err := c.KillPlugin("fuse"); err != nil {
			t.Error(err)
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("%v\n%s", err, out.String())
	}
	if err := c.Unmap(d.Name, false); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(d.Endpoint); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of an unmapped device: %v", err)
	}
}

func TestFuse_UnmapIsRefusedWhileTheFileIsOpen(t *testing.T) {
	_, c, d := fuseRig(t)
	f, err := os.OpenFile(d.Endpoint, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := c.Unmap(d.Name, false); err == nil || !strings.Contains(err.Error(), "busy") {
		t.Errorf("unmap of an open file: %v", err)
	}
	if _, err := f.WriteAt([]byte("still here"), 4000); err != nil {
		t.Errorf("a write after the refusal: %v", err)
	}
	if err := c.Unmap(d.Name, true); err != nil {
		t.Errorf("forced unmap: %v", err)
	}
	if _, err := f.ReadAt(make([]byte, 512), 0); err == nil {
		t.Error("a read of a file whose device is gone succeeds")
	}
}

// TestFuse_MountsOfAKilledDaemonAreRemoved kills the client and starts the next one.
func TestFuse_MountsOfAKilledDaemonAreRemoved(t *testing.T) {
	_, c, d := fuseRig(t)
	if err := c.Kill(); err != nil {
		t.Fatal(err)
	}
	sdktest.Eventually(t, "the mount has no daemon", func() bool {
		_, err := os.Stat(d.Endpoint)
		return errors.Is(err, syscall.ENOTCONN)
	})
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(d.Endpoint); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file of the dead daemon: %v", err)
	}
}

// TestFuse_UnmapRightAfterTheLastClose unmaps at once after a close: the kernel tells the
// front end of the close later than it lets the mount go.
func TestFuse_UnmapRightAfterTheLastClose(t *testing.T) {
	l := lab.New(t)
	s := l.Server(lab.ServerOptions{SearchPath: l.Image("disk.img", 1<<20), Plugins: []string{"fileio"}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--fuse-dir", filepath.Join(l.Dir, "disks")}})
	for i := range 20 {
		d := l.Map(c, "disk.img", s, withFuse)
		f, err := os.OpenFile(d.Endpoint, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt([]byte("data"), 0); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if err := c.Unmap(d.Name, false); err != nil {
			t.Fatalf("unmap %d: %v", i, err)
		}
	}
}
