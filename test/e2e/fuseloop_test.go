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
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/loopdev"
	"github.com/rnbd-go/rnbd/test/lab"
)

// loopRig is a client with a loop device on a file of the front end fuse.
type loopRig struct {
	lab    *lab.T
	server *lab.Server
	client *lab.Client
	disk   *controlpb.ClientDevice
	dir    string // of the files
}

// file is the path of the file below the disk.
func (r *loopRig) file() string { return filepath.Join(r.dir, r.disk.Name) }

func newLoopRig(t *testing.T, size int64) *loopRig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make loop devices")
	}
	for _, node := range []string{"/dev/fuse", "/dev/loop-control"} {
		if _, err := os.Stat(node); err != nil {
			t.Skip("no such device here: ", err)
		}
	}
	r := &loopRig{lab: lab.New(t)}
	r.dir = filepath.Join(r.lab.Dir, "disks")
	r.server = r.lab.Server(lab.ServerOptions{SearchPath: r.lab.Image("disk.img", size), Plugins: []string{"fileio"}})
	r.client = r.lab.Client(lab.ClientOptions{Extra: []string{"--fuse-dir", r.dir, "--loss", "queue:30s"}})
	r.disk = r.lab.Map(r.client, "disk.img", r.server, func(m *controlpb.MapRequest) { m.Frontend = "fuse-loop" })
	return r
}

// TestFuseLoop_IsADisk looks at the loop device of a mapping from its map to its unmap.
func TestFuseLoop_IsADisk(t *testing.T) {
	r := newLoopRig(t, 64<<20)
	node := r.disk.Endpoint
	if !strings.HasPrefix(node, "/dev/loop") || r.disk.Frontend != "fuse-loop" {
		t.Fatalf("endpoint %s of front end %s", node, r.disk.Frontend)
	}
	sys := "/sys/block/" + filepath.Base(node)
	for name, want := range map[string]string{"size": "131072", "loop/dio": "1", "queue/logical_block_size": "512", "loop/backing_file": r.file()} {
		if got := readLine(t, filepath.Join(sys, name)); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	if got := readLine(t, filepath.Join(sys, "queue/discard_max_bytes")); got == "0" {
		t.Error("no discards")
	}
	open, err := os.OpenFile(node, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the user of the disk is counted", func() bool {
		d, err := r.client.Device(r.disk.Name)
		return err == nil && d.Openers == 1
	})
	if err := r.client.Unmap(r.disk.Name, false); err == nil || !strings.Contains(err.Error(), "busy") {
		t.Errorf("unmap of an open disk: %v", err)
	}
	if _, err := open.WriteAt(make([]byte, 4096), 0); err != nil {
		t.Errorf("a write after the refusal: %v", err)
	}
	open.Close()
	if got := readLine(t, filepath.Join(sys, "loop/autoclear")); got != "0" {
		t.Errorf("autoclear is %s after a refused unmap", got)
	}
	if err := r.client.Unmap(r.disk.Name, false); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(sys, "loop")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the loop device of an unmapped disk: %v", err)
	}
}

func readLine(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Error(err)
	}
	return strings.TrimSpace(string(text))
}

// TestFuseLoop_FileSystems makes file systems on the disk and verifies what fio writes
// while the front end is killed. No unmap takes a mounted disk away.
func TestFuseLoop_FileSystems(t *testing.T) {
	for _, kind := range []string{"ext4", "xfs"} {
		t.Run(kind, func(t *testing.T) {
			fio := lab.Tool(t, "fio")
			r := newLoopRig(t, 512<<20)
			run(t, "mkfs."+kind, "-q", r.disk.Endpoint)
			dir := t.TempDir()
			if err := syscall.Mount(r.disk.Endpoint, dir, kind, 0, ""); err != nil {
				t.Fatal(err)
			}
			mounted := true
			defer func() {
				if mounted {
					_ = syscall.Unmount(dir, syscall.MNT_DETACH)
				}
			}()
			done := startFio(t, fio, "--directory="+dir, "--size=16m", "--fsync=64")
			for range 2 {
				time.Sleep(time.Second)
				if err := r.client.KillPlugin("fuse"); err != nil {
					t.Error(err)
				}
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
			if err := r.client.Unmap(r.disk.Name, false); err == nil || !strings.Contains(err.Error(), "busy") {
				t.Errorf("unmap of a mounted disk: %v", err)
			}
			if err := syscall.Unmount(dir, 0); err != nil {
				t.Fatal(err)
			}
			mounted = false
			fsck := map[string][]string{"ext4": {"e2fsck", "-fn"}, "xfs": {"xfs_repair", "-n"}}[kind]
			run(t, fsck[0], fsck[1], r.disk.Endpoint)
			if err := r.client.Unmap(r.disk.Name, false); err != nil {
				t.Error(err)
			}
		})
	}
}

// startFio runs fio for three seconds and sends its result.
func startFio(t *testing.T, fio string, args ...string) <-chan error {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), enough)
	c := exec.CommandContext(ctx, fio, append([]string{"--name=verify", "--rw=randwrite", "--bs=4k", "--iodepth=16", "--ioengine=libaio", "--direct=1",
		"--verify=crc32c", "--time_based", "--runtime=3"}, args...)...)
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		defer cancel()
		err := c.Wait()
		if err != nil {
			err = errors.Join(err, errors.New(out.String()))
		}
		done <- err
	}()
	return done
}

// TestFuseLoop_ForceEndsAMountedDisk unmaps a mounted disk by force: its users get errors,
// and nothing is left once they have gone.
func TestFuseLoop_ForceEndsAMountedDisk(t *testing.T) {
	r := newLoopRig(t, 64<<20)
	run(t, "mkfs.ext4", "-q", r.disk.Endpoint)
	dir := t.TempDir()
	if err := syscall.Mount(r.disk.Endpoint, dir, "ext4", 0, ""); err != nil {
		t.Fatal(err)
	}
	if err := r.client.Unmap(r.disk.Name, true); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "file"), make([]byte, 1<<20), 0o600); err == nil {
		f, err := os.OpenFile(dir, os.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Sync(); err == nil {
			t.Error("a file system on a disk that is gone makes data durable")
		}
		f.Close()
	}
	_ = syscall.Unmount(dir, syscall.MNT_DETACH)
	eventually(t, "the loop device goes with its last user", func() bool {
		_, err := os.Stat("/sys/block/" + filepath.Base(r.disk.Endpoint) + "/loop")
		return errors.Is(err, os.ErrNotExist)
	})
}

// TestFuseLoop_DiskOfAKilledDaemonIsBack kills the client and starts the next one. The
// dead loop device and its mount are gone then, and the device has a disk again.
func TestFuseLoop_DiskOfAKilledDaemonIsBack(t *testing.T) {
	r := newLoopRig(t, 64<<20)
	if err := r.client.Kill(); err != nil {
		t.Fatal(err)
	}
	if got := loopdev.Of(r.file()); len(got) != 1 {
		t.Fatalf("loop devices of a killed daemon: %q", got)
	}
	if err := r.client.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the disk is back", func() bool {
		d, err := r.client.Device(r.disk.Name)
		loops := loopdev.Of(r.file())
		return err == nil && d.State == "open" && len(loops) == 1 && loops[0] == d.Endpoint
	})
	if _, err := os.ReadFile(r.file()); err != nil {
		t.Errorf("read the file: %v", err)
	}
	if err := r.client.Unmap(r.disk.Name, false); err != nil {
		t.Error(err)
	}
	if got := loopdev.Of(r.file()); len(got) != 0 {
		t.Errorf("loop devices after the unmap: %q", got)
	}
}

// TestFuseLoop_Grows changes the size of a disk in use.
func TestFuseLoop_Grows(t *testing.T) {
	r := newLoopRig(t, 64<<20)
	open, err := os.OpenFile(r.disk.Endpoint, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if err := os.Truncate(filepath.Join(r.lab.Dir, "images", "disk.img"), 96<<20); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the disk has grown", func() bool {
		return readLine(t, "/sys/block/"+filepath.Base(r.disk.Endpoint)+"/size") == "196608"
	})
}

// TestFuseLoop_UpgradeKeepsDisksAndFiles upgrades the client twice while fio writes to a
// disk and to a file. The third process must not take the mounts of the first one for dead.
func TestFuseLoop_UpgradeKeepsDisksAndFiles(t *testing.T) {
	fio := lab.Tool(t, "fio")
	r := newLoopRig(t, 64<<20)
	r.lab.Image("other.img", 64<<20)
	file := r.lab.Map(r.client, "other.img", r.server, withFuse)
	first := startFio(t, fio, "--filename="+r.disk.Endpoint, "--size=16m")
	second := startFio(t, fio, "--filename="+file.Endpoint, "--size=16m")
	for range 2 {
		time.Sleep(700 * time.Millisecond)
		reply, err := r.client.Upgrade("")
		if err != nil {
			t.Fatal(err)
		}
		if reply.Closed != 0 {
			t.Errorf("%d users are closed", reply.Closed)
		}
	}
	for _, done := range []<-chan error{first, second} {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	for _, want := range []*controlpb.ClientDevice{r.disk, file} {
		d, err := r.client.Device(want.Name)
		if err != nil || d.Endpoint != want.Endpoint {
			t.Errorf("device %v after the upgrade, want %s, %v", d, want.Endpoint, err)
		}
		if err := r.client.Unmap(want.Name, false); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(filepath.Join(r.dir, want.Name)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the file of an unmapped device: %v", err)
		}
	}
	if got := loopdev.Of(r.file()); len(got) != 0 {
		t.Errorf("loop devices after the unmap: %q", got)
	}
}

// TestFuseLoop_IsChosenBeforeASocket maps with the front end "auto" where neither ublk nor
// nbd is there.
func TestFuseLoop_IsChosenBeforeASocket(t *testing.T) {
	for _, node := range []string{"/dev/ublk-control", "/sys/module/nbd"} {
		if _, err := os.Stat(node); err == nil {
			t.Skip("this host has ", node)
		}
	}
	r := newLoopRig(t, 64<<20)
	r.lab.Image("other.img", 1<<20)
	d := r.lab.Map(r.client, "other.img", r.server, func(m *controlpb.MapRequest) { m.Frontend = "auto" })
	if d.Frontend != "fuse-loop" || len(d.PassedOver) != 2 || !strings.HasPrefix(d.PassedOver[0], "ublk: ") || !strings.HasPrefix(d.PassedOver[1], "nbd: ") {
		t.Errorf("front end %s, passed over %q", d.Frontend, d.PassedOver)
	}
}
