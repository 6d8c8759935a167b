package faults

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// Sizes of the regions of a volume. Each has a writer of its own, which writes the whole
// region at once, in one request.
const (
	regions    = 16
	regionSize = 64 << 10
	snapshots  = 200
)

// region is what its writer knows.
type region struct {
	begun, acknowledged atomic.Uint64 // numbers of writes
}

// TestSnapshotsUnderLoad: each snapshot has every write that was acknowledged before the
// call, none that began after it, and no write in part.
func TestSnapshotsUnderLoad(t *testing.T) {
	l := lab.New(t)
	pool := reflinkPool(t, l)
	config := filepath.Join(l.Dir, "pools.yaml")
	if err := os.WriteFile(config, []byte("pools:\n  - {name: fast, kind: files, path: "+pool+"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := l.Server(lab.ServerOptions{Plugins: []string{"fileio"}, Extra: []string{"--config", config}})
	ctx, cancel := context.WithTimeout(t.Context(), enough)
	defer cancel()
	api, conn, err := control.DialServer(ctx, s.Socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := api.InitPool(ctx, &controlpb.PoolRequest{Pool: "fast"}); err != nil {
		t.Fatal(err)
	}
	if _, err := api.CreateVolume(ctx, &controlpb.CreateVolumeRequest{Pool: "fast", Name: "v", Size: regions * regionSize}); err != nil {
		t.Fatal(err)
	}
	c := l.Client(lab.ClientOptions{})
	dev := l.Map(c, "fast/v", s)
	var all [regions]region
	stop := writeRegions(t, c, dev.Name, &all)
	defer stop()
	most := 0
	for n := range snapshots {
		name := fmt.Sprint("s", n)
		var before, after [regions]uint64
		for i := range all {
			before[i] = all[i].acknowledged.Load()
		}
		v, err := api.CreateSnapshot(ctx, &controlpb.CreateSnapshotRequest{Pool: "fast", Name: "v", Snapshot: name})
		if err != nil {
			t.Fatalf("snapshot %d: %v", n, err)
		}
		if v.Copied != "reflink" {
			t.Fatalf("snapshot %d is a %s", n, v.Copied)
		}
		for i := range all {
			after[i] = all[i].begun.Load()
		}
		between, err := judgeSnapshot(filepath.Join(pool, "v@"+name), before, after)
		if err != nil {
			t.Fatalf("snapshot %d: %v", n, err)
		}
		most = max(most, between)
		if _, err := api.DeleteSnapshot(ctx, &controlpb.DeleteSnapshotRequest{Pool: "fast", Name: "v", Snapshot: name}); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	total := uint64(0)
	for i := range all {
		total += all[i].acknowledged.Load()
	}
	t.Logf("%d writes of %d bytes, %d snapshots", total, regionSize, snapshots)
	if total < regions || most == 0 {
		t.Errorf("%d writes, and no snapshot had one of the time of its call: the load is no test", total)
	}
}

// reflinkPool mounts an XFS on a loop device.
func reflinkPool(t *testing.T, l *lab.T) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	mkfs := lab.Tool(t, "mkfs.xfs")
	image, dir := filepath.Join(l.Dir, "xfs.img"), filepath.Join(l.Dir, "pool")
	for _, err := range []error{os.WriteFile(image, nil, 0o600), os.Truncate(image, 400<<20), os.Mkdir(dir, 0o700)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if out, err := exec.Command(mkfs, "-q", "-f", image).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.xfs: %v: %s", err, out)
	}
	if out, err := exec.Command("mount", "-o", "loop", image, dir).CombinedOutput(); err != nil {
		t.Skipf("this host has no loop devices or no XFS: %s", out)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount: %v", err)
		}
	})
	return dir
}

// writeRegions writes to all regions until the function that it returns is called.
func writeRegions(t *testing.T, c *lab.Client, device string, all *[regions]region) (stop func()) {
	t.Helper()
	quit := make(chan struct{})
	var writers sync.WaitGroup
	for i := range all {
		ctx, cancel := context.WithTimeout(t.Context(), enough)
		n, err := nbdclient.Dial(ctx, "unix", c.NBD, nbdclient.Options{Export: device})
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		writers.Go(func() {
			defer n.Close()
			buf := make([]byte, regionSize)
			for number := uint64(1); ; number++ {
				select {
				case <-quit:
					return
				default:
				}
				for at := 0; at < len(buf); at += 8 {
					binary.LittleEndian.PutUint64(buf[at:], number)
				}
				all[i].begun.Store(number)
				if _, err := n.WriteAt(buf, int64(i)*regionSize); err != nil {
					t.Errorf("write: %v", err)
					return
				}
				all[i].acknowledged.Store(number)
			}
		})
	}
	return sync.OnceFunc(func() { close(quit); writers.Wait() })
}

// judgeSnapshot compares a snapshot with what the writers knew before and after the call.
// between counts the regions with a write that was not acknowledged before it.
func judgeSnapshot(file string, before, after [regions]uint64) (between int, err error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	var errs []error
	for i := range regions {
		part := content[i*regionSize : (i+1)*regionSize]
		number := binary.LittleEndian.Uint64(part)
		switch {
		case !bytes.Equal(part[8:], part[:len(part)-8]):
			errs = append(errs, fmt.Errorf("region %d has a part of a write", i))
		case number < before[i]:
			errs = append(errs, fmt.Errorf("region %d has write %d, and %d was acknowledged before the call", i, number, before[i]))
		case number > after[i]:
			errs = append(errs, fmt.Errorf("region %d has write %d, and %d was the last one to begin", i, number, after[i]))
		case number > before[i]:
			between++
		}
	}
	return between, errors.Join(errs...)
}
