package devices

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
)

// TestGuest is the part of the tests inside a guest: one stack per front end,
// and every test on it.
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
				{"file systems", testFileSystems},
				{"verified I/O of mixed sizes", testMixedSizes},
				{"discard and partitions", testDiscardAndPartitions},
				{"growing disk", testGrowing},
				{"kills under load", testKills},
				{"client stopped under load", testClientStopped},
				{"upgrades under load", testUpgrades},
				{"raid over two servers", testRAID},
				{"files against a model", testModel},
				{"stress", testStress},
				{"power cuts", testPowerCuts},
				{"read-only", testReadOnly},
				{"unmap while mounted", testUnmapMounted},
				{"forced unmap under load", testForcedUnmapUnderLoad},
				{"forced unmap without plugin", testForcedUnmapWithoutPlugin},
				{"bad input", testBadInput},
				{"links by udev", testUdev},
			} {
				t.Run(test.name, func(t *testing.T) { test.run(t, s) })
			}
			switch fe.name {
			case "ublk":
				t.Run("zero copy", func(t *testing.T) { testZeroCopy(t, s) })
				t.Run("one of sixteen disks hangs", func(t *testing.T) { testHung(t, s) })
			case "nbd":
				t.Run("several connections", func(t *testing.T) { testSeveralConnections(t, s) })
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
	for line := range strings.Lines(s.client.Log()) { // it has the features of the driver
		if strings.Contains(line, "disk is ready") {
			t.Log(line)
			break
		}
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

// testMixedSizes verifies with several sizes of requests, then with two writers
// that have a part of the disk each; for a minute in the long form.
func testMixedSizes(t *testing.T, s *stack) {
	_, image := s.disk(t, s.image(t, 64<<20))
	_, ram := s.disk(t, s.ram)
	for end := time.Now().Add(pick(0, time.Minute)); ; {
		run(t, fio(image, "--rw=randrw", "--bsrange=512-256k", "--bs_unaligned=0", "--blockalign=512", "--size="+pick("2m", "64m"), "--fsync=32")...)
		run(t, fio(ram, "--rw=randwrite", "--bs=4k", "--numjobs=2", "--offset_increment=32m", "--size="+pick("2m", "32m"))...)
		if time.Now().After(end) {
			return
		}
	}
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
	_, node = s.disk(t, image) // partitions are found when the disk appears
	eventually(t, "the partition's node", func() bool { _, err := os.Stat(node + "p2"); return err == nil })
	run(t, "e2fsck", "-f", "-n", node+"p2")
}

func blocks(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Stat(path, &st))
	return st.Blocks * 512
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
	eventually(t, "the disk is open, with a user, after the refusal", func() bool {
		now, err := s.client.Device(d.Name)
		return err == nil && now.Openers >= 1 && now.State == "open"
	})
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
	defer s.users(t, d)()
	begin := time.Now()
	must(t, s.client.Unmap(d.Name, true))
	if took := time.Since(begin); took > 2*time.Minute {
		t.Errorf("a forced unmap takes %s", took)
	}
	s.leftOver(t, node)
}

// testForcedUnmapWithoutPlugin takes disks away just after the death of their
// plugin. The kernel has them still: the next process takes them away, and goes
// on with others.
func testForcedUnmapWithoutPlugin(t *testing.T, s *stack) {
	_, other := s.disk(t, s.image(t, 8<<20), queueing)
	for i := range pick(3, 20) {
		d, node := s.disk(t, s.ram)
		end := s.users(t, d)
		must(t, s.client.KillPlugin(s.frontend))
		time.Sleep(time.Duration(i%5) * 100 * time.Millisecond) // the next process is further on each time
		must(t, s.client.Unmap(d.Name, true))
		s.leftOver(t, node)
		end()
		run(t, fio(other, "--rw=randrw", "--bs=4k", "--size=256k")...)
	}
}

// users begins a load on d that does not mind errors, and returns how to end it.
func (s *stack) users(t *testing.T, d *controlpb.ClientDevice) (end func()) {
	t.Helper()
	users := exec.Command("fio", "--name=x", "--filename="+d.Endpoint, "--direct=1", "--ioengine=libaio", "--iodepth=8", "--rw=randrw",
		"--bs=4k", "--size=32m", "--time_based", "--runtime=600")
	var out bytes.Buffer // Wait waits for all that write to it: for fio's jobs too
	users.Stdout, users.Stderr = &out, &out
	users.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	must(t, users.Start())
	end = sync.OnceFunc(func() { syscall.Kill(-users.Process.Pid, syscall.SIGKILL); users.Wait() })
	t.Cleanup(end)
	eventually(t, "load", func() bool { d, err := s.client.Device(d.Name); return err == nil && d.TxSectors > 20 })
	return end
}

func testBadInput(t *testing.T, s *stack) {
	odd := s.image(t, 1<<20+512)
	d, node := s.disk(t, s.ram)
	number := strings.TrimPrefix(strings.TrimPrefix(node, "/dev/ublkb"), "/dev/nbd")
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
		eventually(t, "one node is left", func() bool { nodes, _ := filepath.Glob("/dev/ublkc*"); return len(nodes) == 1 })
	}
}
