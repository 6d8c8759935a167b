package devices

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

const array = "/dev/md0"

// testRAID mirrors two disks from two servers. One server dies under load and
// comes back; its disk is added again and catches up. In the end both have the
// same data, verified by load.
func testRAID(t *testing.T, s *stack) {
	run(t, "modprobe", "raid1")
	t.Setenv("MDADM_NO_UDEV", "1") // nobody makes nodes here but the kernel
	second := s.lab.Server(lab.ServerOptions{SearchPath: "/", Extra: quick})
	t.Cleanup(func() { must(t, second.Stop()) })
	size := pick[int64](8<<20, 64<<20)
	images := [2]string{s.image(t, size), s.image(t, size)}
	_, one := s.disk(t, images[0])
	d, two := s.disk(t, images[1], func(r *controlpb.MapRequest) { r.Session, r.Paths = "second", second.Addrs })

	// Metadata 1.0 lies at the end: the data of both legs begins where the disks begin.
	// Failfast: a write that fails costs the leg; without it md tries sector by sector and notes bad blocks.
	run(t, "mdadm", "--create", array, "--run", "--level=1", "--raid-devices=2", "--metadata=1.0", "--bitmap=internal", "--bitmap-chunk=64K", "--assume-clean", "--failfast", one, two)
	t.Cleanup(func() { exec.Command("mdadm", "--stop", array).Run() })
	must(t, os.WriteFile(mdFile("sync_speed_min"), []byte("1000000"), 0)) // do not wait for an idle moment to catch up
	end := load(t, array, pick("2m", "8m"))
	for range pick(1, 3) {
		awaitIO(t, array)
		must(t, second.Kill())
		eventually(t, "the array notices", func() bool { return md("degraded") == "1" })
		awaitIO(t, array)
		must(t, second.Start())
		eventually(t, "the disk is back", func() bool { now, err := s.client.Device(d.Name); return err == nil && now.State == "open" })
		if !*long {
			end() // to catch up under load takes a minute
		}
		eventually(t, "the lost leg can be removed", func() bool { _, err := attempt("mdadm", array, "--remove", two); return err == nil })
		run(t, "mdadm", array, "--re-add", "--failfast", two)
		eventually(t, "the array has caught up", func() bool { return md("degraded") == "0" && md("sync_action") == "idle" })
	}
	end()

	must(t, os.WriteFile(mdFile("sync_action"), []byte("check"), 0))
	eventually(t, "the end of the check", func() bool { return md("sync_action") == "idle" })
	if n := md("mismatch_cnt"); n != "0" {
		t.Errorf("%s sectors differ", n)
	}
	eventually(t, "the array is clean", func() bool { return md("array_state") == "clean" })
	kib := md("component_size")
	run(t, "mdadm", "--stop", array)
	var bytes int64
	if _, err := fmt.Sscan(kib, &bytes); err != nil || bytes == 0 {
		t.Fatalf("component size %q", kib)
	}
	run(t, "cmp", "-n", fmt.Sprint(bytes<<10), images[0], images[1])
}

// md reads an attribute of the array.
func md(name string) string { return strings.TrimSpace(readFile(mdFile(name))) }

func mdFile(name string) string {
	return filepath.Join("/sys/block", filepath.Base(array), "md", name)
}
