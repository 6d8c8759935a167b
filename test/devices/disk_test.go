package devices

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// TestGuest is what a guest runs: one stack per front end, and every test on
// it.
func TestGuest(t *testing.T) {
	if !*inGuest {
		t.Skip("runs in a guest, see TestInGuest")
	}
	for _, fe := range frontends {
		t.Run(fe.name, func(t *testing.T) {
			s := newStack(t, fe.name)
			for _, test := range []struct {
				name string
				run  func(*testing.T, *stack)
			}{
				{"data of a block device", testBlockDevice},
				{"ext4 on a file", testExt4},
				{"xfs on a file", testXFS},
				{"verified I/O of mixed sizes", testMixedSizes},
				{"discard and partitions", testDiscardAndPartitions},
				{"plugin killed under load", testPluginKilled},
				{"client killed under load", testClientKilled},
				{"client stopped under load", testClientStopped},
				{"read-only", testReadOnly},
				{"unmap while mounted", testUnmapMounted},
				{"forced unmap under load", testForcedUnmapUnderLoad},
				{"bad input", testBadInput},
			} {
				t.Run(test.name, func(t *testing.T) { test.run(t, s) })
			}
		})
	}
}

func testBlockDevice(t *testing.T, s *stack) {
	d, node := s.disk(t, s.ram)
	if s.frontend == "nbd" { // it cannot be told
		d.Limits.PhysicalBlockSize = d.Limits.LogicalBlockSize
	}
	for name, want := range map[string]string{
		"logical_block_size": fmt.Sprint(d.Limits.LogicalBlockSize), "physical_block_size": fmt.Sprint(d.Limits.PhysicalBlockSize), "rotational": "0",
	} {
		if got := queue(node, name); got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
	if size := strings.TrimSpace(run(t, "blockdev", "--getsize64", node)); size != fmt.Sprint(d.Limits.Size) {
		t.Errorf("size %s, want %d", size, d.Limits.Size)
	}
	link := filepath.Join(s.client.Links, d.Session, "!dev!ram0")
	if target, err := os.Readlink(link); err != nil || target != node {
		t.Errorf("%s leads to %q, %v; want %s", link, target, err, node)
	}
	data := filepath.Join(t.TempDir(), "data")
	run(t, "dd", "if=/dev/urandom", "of="+data, "bs=1M", "count=4")
	run(t, "dd", "if="+data, "of="+node, "bs=1M", "oflag=direct")
	run(t, "cmp", "-n", "4194304", data, s.ram) // it is on the server's disk, not in a cache
	run(t, "blockdev", "--flushbufs", node)
	run(t, "cmp", "-n", "4194304", data, node)
	if d, err := s.client.Device(d.Name); err != nil || d.Openers != 0 {
		t.Errorf("%v users, %v", d.GetOpeners(), err)
	}
	f, err := os.Open(node)
	must(t, err)
	defer f.Close()
	sleeper := exec.Command("sleep", "60")
	sleeper.ExtraFiles = []*os.File{f}
	must(t, sleeper.Start())
	defer func() { sleeper.Process.Kill(); sleeper.Wait() }()
	f.Close()
	eventually(t, "the user is seen", func() bool { d, err := s.client.Device(d.Name); return err == nil && d.Openers == 1 })
	if err := s.client.Unmap(d.Name, false); blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("unmap while open: %v", err)
	}
}

// tree is the source that is copied onto file systems.
func tree(t *testing.T) string { return filepath.Join(lab.Root(), "modules", "rnbd-sdk", "shm") }

func (s *stack) fileSystem(t *testing.T, node, fs string, mkfs, check []string) {
	t.Helper()
	run(t, append(mkfs, node)...)
	dir := t.TempDir()
	run(t, "mount", "-t", fs, node, dir)
	run(t, "sh", "-c", "tar -C "+tree(t)+" -cf - . | tar -C "+dir+" -xf -")
	run(t, "umount", dir)
	run(t, "mount", "-t", fs, node, dir)
	run(t, "diff", "-r", tree(t), dir, "-x", "lost+found")
	run(t, "rm", dir+"/ring.go")
	run(t, "fstrim", dir)
	run(t, "umount", dir)
	run(t, append(check, node)...)
}

func testExt4(t *testing.T, s *stack) {
	d, node := s.disk(t, s.image(t, 64<<20))
	if got := queue(node, "write_cache"); got != "write back" || !d.Limits.WriteCache {
		t.Errorf("write cache is %q", got)
	}
	s.fileSystem(t, node, "ext4", []string{"mkfs.ext4", "-q", "-F"}, []string{"e2fsck", "-f", "-n"})
}

func testXFS(t *testing.T, s *stack) {
	if !*long {
		t.Skip("long form")
	}
	_, node := s.disk(t, s.image(t, 310<<20))
	s.fileSystem(t, node, "xfs", []string{"mkfs.xfs", "-q", "-f"}, []string{"xfs_repair", "-n"})
}

func testMixedSizes(t *testing.T, s *stack) {
	size := "2m"
	if *long {
		size = "64m"
	}
	_, node := s.disk(t, s.image(t, 64<<20))
	run(t, fio(node, "--rw=randrw", "--bsrange=512-256k", "--bs_unaligned=0", "--blockalign=512", "--size="+size, "--fsync=32")...)
	_, node = s.disk(t, s.ram)
	run(t, fio(node, "--rw=randwrite", "--bs=4k", "--numjobs=2", "--offset_increment=32m", "--size="+size)...)
}

func testDiscardAndPartitions(t *testing.T, s *stack) {
	image := s.image(t, 64<<20)
	d, node := s.disk(t, image)
	if d.Limits.MaxDiscard == 0 {
		t.Fatal("fileio offers no discard")
	}
	run(t, "dd", "if=/dev/urandom", "of="+node, "bs=1M", "count=8", "oflag=direct")
	before := blocks(t, image)
	run(t, "blkdiscard", "--offset", "1048576", "--length", "4194304", node)
	if after := blocks(t, image); before-after < 4<<20 {
		t.Errorf("the image gave %d bytes back, want 4 MiB", before-after)
	}
	run(t, "cmp", "-n", "4194304", "-i", "1048576:0", node, "/dev/zero")
	run(t, "blkdiscard", "--zeroout", "--offset", "0", "--length", "1048576", node)
	run(t, "cmp", "-n", "1048576", node, "/dev/zero")
	script := exec.Command("sfdisk", "-q", node)
	script.Stdin = strings.NewReader("label: gpt\nsize=16M\nsize=16M\n")
	if out, err := script.CombinedOutput(); err != nil {
		t.Fatalf("sfdisk: %v\n%s", err, out)
	}
	run(t, "blockdev", "--rereadpt", node)
	second := node + "p2"
	eventually(t, "the partition's node", func() bool { _, err := os.Stat(second); return err == nil })
	run(t, "mkfs.ext4", "-q", "-F", second)
	dir := t.TempDir()
	run(t, "mount", second, dir)
	err := s.client.Unmap(d.Name, false)
	run(t, "umount", dir)
	if blk.ToErrno(err) != blk.EBUSY {
		t.Errorf("unmap with a mounted partition: %v", err)
	}
	must(t, s.client.Unmap(d.Name, false))
	d, node = s.disk(t, image) // partitions are found when the disk appears
	eventually(t, "the partition's node", func() bool { _, err := os.Stat(node + "p2"); return err == nil })
	run(t, "e2fsck", "-f", "-n", node+"p2")
}

func blocks(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Stat(path, &st))
	return st.Blocks * 512
}

// testPluginKilled: users of the disk see a pause and nothing else.
func testPluginKilled(t *testing.T, s *stack) {
	kills := 3
	if *long {
		kills = 20
	}
	d, node := s.disk(t, s.image(t, 64<<20))
	end := load(node)
	for i := range kills {
		time.Sleep(time.Duration(500+700*i%1000) * time.Millisecond)
		before, err := s.client.Plugin(s.plugin)
		must(t, err)
		s.killPlugin(t)
		eventually(t, "the next process", func() bool {
			p, err := s.client.Plugin(s.plugin)
			return err == nil && p.Pid != 0 && p.Pid != before.Pid
		})
	}
	if err := end(); err != nil {
		t.Errorf("users saw it: %v", err)
	}
	if now, err := s.client.Device(d.Name); err != nil || now.Endpoint != node {
		t.Errorf("the disk is at %q, %v; want %s", now.GetEndpoint(), err, node)
	}
}

// load writes and verifies, one pass after another, until it is told to end;
// the error is of the first pass that failed.
func load(node string) (end func() error) {
	size := "2m"
	if *long {
		size = "64m"
	}
	ended := make(chan error, 1)
	stop := make(chan struct{})
	go func() {
		for {
			if _, err := attempt(fio(node, "--rw=randwrite", "--bs=4k", "--size="+size)...); err != nil {
				ended <- err
				return
			}
			select {
			case <-stop:
				ended <- nil
				return
			default:
			}
		}
	}()
	return func() error {
		close(stop)
		return <-ended
	}
}

// testClientKilled: the next daemon serves the disk again by itself.
func testClientKilled(t *testing.T, s *stack) {
	d, node := s.disk(t, s.image(t, 64<<20))
	end := load(node)
	time.Sleep(time.Second)
	must(t, s.client.Kill())
	if _, err := os.Stat("/sys/block/" + filepath.Base(node)); err != nil {
		t.Errorf("the disk went with the daemon: %v", err)
	}
	must(t, s.client.Start())
	eventually(t, "the disk is served again", func() bool {
		now, err := s.client.Device(d.Name)
		return err == nil && now.Endpoint == node && now.State == "open"
	})
	if err := end(); err != nil {
		t.Errorf("users saw it: %v", err)
	}
}

func testReadOnly(t *testing.T, s *stack) {
	_, node := s.disk(t, s.image(t, 64<<20), readOnly)
	if ro := strings.TrimSpace(run(t, "blockdev", "--getro", node)); ro != "1" {
		t.Errorf("getro says %s", ro)
	}
	if out, err := attempt("dd", "if=/dev/zero", "of="+node, "bs=4k", "count=1", "oflag=direct"); err == nil {
		t.Errorf("a write succeeds: %s", out)
	}
	run(t, "dd", "if="+node, "of=/dev/null", "bs=1M", "count=4", "iflag=direct")
}

func testUnmapMounted(t *testing.T, s *stack) {
	d, node := s.disk(t, s.image(t, 64<<20))
	run(t, "mkfs.ext4", "-q", "-F", node)
	dir := t.TempDir()
	run(t, "mount", node, dir)
	mounted := true
	defer func() {
		if mounted {
			exec.Command("umount", "-l", dir).Run()
		}
	}()
	must(t, os.WriteFile(dir+"/file", []byte("kept"), 0o644))
	run(t, "sync", "-f", dir)
	if err := s.client.Unmap(d.Name, false); blk.ToErrno(err) != blk.EBUSY {
		t.Fatalf("unmap while mounted: %v", err)
	}
	if now, err := s.client.Device(d.Name); err != nil || now.Openers < 1 || now.State != "open" {
		t.Errorf("after the refusal: %+v, %v", now, err)
	}
	if got := readFile(dir + "/file"); got != "kept" {
		t.Errorf("the file has %q", got)
	}
	must(t, s.client.Unmap(d.Name, true))
	exec.Command("umount", "-l", dir).Run()
	mounted = false
	s.leftOver(t, node)
}

func testForcedUnmapUnderLoad(t *testing.T, s *stack) {
	d, node := s.disk(t, s.ram)
	users := exec.Command("fio", "--name=x", "--filename="+node, "--direct=1", "--ioengine=libaio", "--iodepth=8", "--rw=randrw",
		"--bs=4k", "--size=32m", "--time_based", "--runtime=600")
	must(t, users.Start())
	defer func() { users.Process.Kill(); users.Wait() }()
	eventually(t, "load", func() bool { d, err := s.client.Device(d.Name); return err == nil && d.TxSectors > 20 })
	begin := time.Now()
	must(t, s.client.Unmap(d.Name, true))
	if took := time.Since(begin); took > 30*time.Second {
		t.Errorf("a forced unmap takes %s", took)
	}
}

func testBadInput(t *testing.T, s *stack) {
	odd := s.image(t, 1<<20+512)
	d, node := s.disk(t, s.ram)
	number := strings.TrimLeft(node, "/dev/ublkn")
	for _, v := range []struct {
		name  string
		path  string
		with  change
		errno blk.Errno
		words string
	}{
		{"number that is taken", odd, func(r *controlpb.MapRequest) { r.Options = map[string]string{"number": number} }, 0, "taken"},
		{"number that is none", odd, func(r *controlpb.MapRequest) { r.Options = map[string]string{"number": "x"} }, blk.EINVAL, "number"},
		{"unknown setting", odd, func(r *controlpb.MapRequest) { r.Options = map[string]string{"colour": "red"} }, blk.EINVAL, "colour"},
		{"file that is not there", "/nowhere", nil, blk.ENOENT, "/nowhere"},
	} {
		var with []change
		if v.with != nil {
			with = append(with, v.with)
		}
		if d, err := s.client.Map(v.path, s.server, with...); err == nil {
			t.Errorf("%s: mapped at %s", v.name, d.Endpoint)
			s.client.Unmap(d.Name, true)
		} else if v.errno != 0 && blk.ToErrno(err) != v.errno || !strings.Contains(err.Error(), v.words) {
			t.Errorf("%s: %v", v.name, err)
		}
	}
	if _, err := s.client.Device(d.Name); err != nil {
		t.Error(err)
	}
	l, err := s.client.API.ListDevices(t.Context(), &controlpb.ListRequest{})
	if err != nil || len(l.Devices) != 1 {
		t.Errorf("%d devices are mapped, %v; want 1", len(l.GetDevices()), err)
	}
	if s.frontend == "ublk" {
		if nodes, _ := filepath.Glob("/dev/ublkc*"); len(nodes) != 1 {
			t.Errorf("left behind: %v", nodes)
		}
	}
}
