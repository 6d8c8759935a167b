package ceph

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// enough is the time after which a wait has failed.
const enough = 2 * time.Minute

// cluster is a running Ceph cluster.
type cluster struct {
	t        *testing.T
	root     string // of the unpacked packages
	dir      string
	conf     string
	mon, osd *exec.Cmd
}

const confText = `[global]
fsid = 9b1f4e2e-6a0b-4f7b-8c53-6a8e6f0e2a11
mon initial members = a
mon host = [v2:127.0.0.1:17200]
ms bind ipv6 = false
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd crush chooseleaf type = 0
mon allow pool size one = true
run dir = DIR
admin socket = DIR/$name.$pid.asok
log file = DIR/$name.log
mon data = DIR/mon
osd data = DIR/osd
osd objectstore = memstore
memstore device bytes = 1073741824
osd op num shards = 1
osd op num threads per shard = 2
plugin dir = LIB/ceph
erasure code dir = LIB/ceph/erasure-code
osd class dir = LIB/rados-classes
mon data avail warn = 1
mon data avail crit = 1
`

// startCluster starts a cluster with the pool rbd.
func startCluster(t *testing.T) *cluster {
	t.Helper()
	root := os.Getenv("RNBD_CEPH")
	if root == "" {
		t.Skip("RNBD_CEPH is not set: `make test-ceph` runs these tests")
	}
	c := &cluster{t: t, root: root, dir: t.TempDir()}
	c.conf = filepath.Join(c.dir, "ceph.conf")
	text := strings.NewReplacer("DIR", c.dir, "LIB", c.lib()).Replace(confText)
	if err := os.WriteFile(c.conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"mon", "osd"} {
		if err := os.Mkdir(filepath.Join(c.dir, d), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	monmap := filepath.Join(c.dir, "monmap")
	c.run("monmaptool", "--create", "--addv", "a", "[v2:127.0.0.1:17200]", "--fsid", "9b1f4e2e-6a0b-4f7b-8c53-6a8e6f0e2a11", monmap)
	c.run("ceph-mon", "-c", c.conf, "--mkfs", "-i", "a", "--monmap", monmap)
	c.mon = c.daemon("ceph-mon", "-c", c.conf, "-i", "a", "-f")
	const osd = "3f3c4d77-21c5-4a68-a3ab-0f0b8b8a7f01"
	c.ceph("osd", "new", osd, "0")
	c.run("ceph-osd", "-c", c.conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
	c.osd = c.daemon("ceph-osd", "-c", c.conf, "-i", "0", "-f")
	for end := time.Now().Add(enough); !strings.Contains(c.ceph("osd", "stat"), "1 up"); time.Sleep(200 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the OSD does not come up")
		}
	}
	c.ceph("osd", "crush", "add", "osd.0", "1", "root=default", "host=localhost")
	c.ceph("osd", "pool", "create", "rbd", "8", "8")
	c.rbd("pool", "init", "rbd")
	return c
}

func (c *cluster) lib() string { return filepath.Join(c.root, "usr/lib/x86_64-linux-gnu") }

// command is a program of the packages.
func (c *cluster) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(c.root, "usr/bin", name), args...)
	cmd.Env = append(os.Environ(), "CEPH_CONF="+c.conf, "LD_LIBRARY_PATH="+c.lib()+":"+c.lib()+"/ceph",
		"PYTHONPATH="+filepath.Join(c.root, "usr/lib/python3/dist-packages"))
	return cmd
}

func (c *cluster) run(name string, args ...string) string {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), enough)
	defer cancel()
	out, err := c.command(ctx, name, args...).CombinedOutput()
	if err != nil {
		c.t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (c *cluster) ceph(args ...string) string {
	c.t.Helper()
	return c.run("ceph", append([]string{"-c", c.conf}, args...)...)
}

func (c *cluster) rbd(args ...string) string {
	c.t.Helper()
	return c.run("rbd", append([]string{"-c", c.conf}, args...)...)
}

// daemon starts a program that runs until the end of the test.
func (c *cluster) daemon(name string, args ...string) *exec.Cmd {
	c.t.Helper()
	cmd := c.command(context.Background(), name, args...)
	log, err := os.Create(filepath.Join(c.dir, fmt.Sprintf("%s.out", name)))
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}
