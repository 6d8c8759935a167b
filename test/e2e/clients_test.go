package e2e

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

const deviceSize = 128 << 20

// bothKeyModes runs a test with and without a change of the chunk's key after
// each request.
func bothKeyModes(t *testing.T, test func(t *testing.T, r *rig)) {
	for _, mode := range []string{"true", "false"} {
		t.Run("always-invalidate="+mode, func(t *testing.T) {
			test(t, newRig(t, rigOptions{size: deviceSize, server: lab.ServerOptions{
				Addrs: []string{"127.0.0.1", "127.0.0.2"}, Extra: []string{"--always-invalidate=" + mode},
			}}))
		})
	}
}

func TestNbdinfoSeesTheDevice(t *testing.T) {
	r := newRig(t, rigOptions{size: deviceSize})
	for _, uri := range []string{r.unixURI(), r.tcpURI()} {
		var info struct {
			Exports []struct {
				Name     string `json:"export-name"`
				Size     int64  `json:"export-size"`
				ReadOnly bool   `json:"is_read_only"`
				Flush    bool   `json:"can_flush"`
				FUA      bool   `json:"can_fua"`
				Trim     bool   `json:"can_trim"`
				Zero     bool   `json:"can_zero"`
				Multi    bool   `json:"can_multi_conn"`
				Min      int    `json:"block_size_minimum"`
				Pref     int    `json:"block_size_preferred"`
				Max      int    `json:"block_size_maximum"`
			}
		}
		if err := json.Unmarshal([]byte(run(t, "nbdinfo", "--json", uri)), &info); err != nil || len(info.Exports) != 1 {
			t.Fatalf("%v: %+v", err, info)
		}
		e := info.Exports[0]
		if e.Size != deviceSize || e.ReadOnly || !e.Flush || !e.FUA || !e.Trim || !e.Zero || !e.Multi {
			t.Errorf("%s: %+v", uri, e)
		}
		if e.Min != 1 || e.Pref != 4096 || e.Max != 32<<20 {
			t.Errorf("%s: block sizes %d, %d, %d, want 1, 4096, 32 MiB", uri, e.Min, e.Pref, e.Max)
		}
	}
}

func TestNbdinfoListsAllDevices(t *testing.T) {
	r := newRig(t, rigOptions{size: 1 << 20})
	r.Image("second.img", 2<<20)
	second := r.Map(r.client, "second.img", r.server, func(m *controlpb.MapRequest) { m.Name, m.AccessMode = "other", "ro" })
	list := run(t, "nbdinfo", "--list", "nbd+unix:///?socket="+r.client.NBD)
	for _, want := range []string{`export="` + r.device.Name + `"`, `export="` + second.Name + `"`, "export-size: 1048576", "export-size: 2097152", "is_read_only: true"} {
		if !strings.Contains(list, want) {
			t.Errorf("nbdinfo --list does not show %s:\n%s", want, list)
		}
	}
	eventually(t, "nbdinfo has left and the device is unmapped", func() bool { return r.client.Unmap(second.Name, false) == nil })
	if list := run(t, "nbdinfo", "--list", "nbd://"+r.tcp); strings.Contains(list, second.Name) {
		t.Errorf("an unmapped device is still listed:\n%s", list)
	}
}

func TestNbdcopyThereAndBack(t *testing.T) {
	bothKeyModes(t, func(t *testing.T, r *rig) {
		source := randomFile(t, deviceSize)
		want := sumOf(t, source)
		for _, uri := range []string{r.unixURI(), r.tcpURI()} {
			run(t, "nbdcopy", "--flush", source, uri)
			back := filepath.Join(t.TempDir(), "back")
			run(t, "nbdcopy", uri, back)
			if sumOf(t, back) != want {
				t.Errorf("%s: what was read back is not what was written", uri)
			}
			if sumOf(t, r.image) != want {
				t.Errorf("%s: the server's file is not what was written", uri)
			}
			if err := os.Remove(back); err != nil {
				t.Fatal(err)
			}
			run(t, "qemu-io", "-f", "raw", "-c", fmt.Sprintf("write -z 0 %d", deviceSize), uri) // for the next turn
		}
	})
}

func TestQemuImgConvertsThroughTheDevice(t *testing.T) {
	bothKeyModes(t, func(t *testing.T, r *rig) {
		const used = 64 << 20
		source := randomFile(t, used)
		want := sumOf(t, source)
		dir := t.TempDir()
		packed, raw := filepath.Join(dir, "a.qcow2"), filepath.Join(dir, "back.raw")

		run(t, "qemu-img", "convert", "-f", "raw", "-O", "qcow2", source, packed)
		run(t, "qemu-img", "convert", "-n", "-f", "qcow2", "-O", "raw", packed, r.unixURI())
		run(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", source, r.unixURI())
		if err := os.Truncate(r.image, deviceSize); err != nil {
			t.Fatal(err)
		}
		run(t, "qemu-img", "compare", "-f", "raw", "-F", "raw", source, r.image)

		// A qcow2 image inside the device: small, unaligned metadata writes.
		run(t, "qemu-img", "create", "-f", "qcow2", r.tcpURI(), "64M")
		run(t, "qemu-img", "convert", "-n", "-f", "raw", "-O", "qcow2", source, r.tcpURI())
		run(t, "qemu-img", "check", "-f", "qcow2", r.unixURI())
		run(t, "qemu-img", "convert", "-f", "qcow2", "-O", "raw", r.unixURI(), raw)
		if sumOf(t, raw) != want {
			t.Error("what comes out of the qcow2 image in the device is not what went in")
		}
	})
}

func TestQemuIoWritesUnalignedRanges(t *testing.T) {
	bothKeyModes(t, func(t *testing.T, r *rig) {
		io := func(uri string, commands ...string) {
			t.Helper()
			argv := []string{"qemu-io", "-f", "raw"}
			for _, c := range commands {
				argv = append(argv, "-c", c)
			}
			if out := run(t, append(argv, uri)...); strings.Contains(out, "fail") {
				t.Errorf("qemu-io: %s", out)
			}
		}
		io(r.unixURI(), "write -P 0xaa 0 8M", "write -P 1 1 510", "write -P 2 1000 4097", "write -P 3 131071 131074", "write -P 4 1048575 3145731", "flush")
		verify := []string{
			"read -P 0xaa 0 1", "read -P 1 1 510", "read -P 0xaa 511 489", "read -P 2 1000 4097", "read -P 0xaa 5097 125974",
			"read -P 3 131071 131074", "read -P 4 1048575 3145731", "read -P 0xaa 4194306 4194302", "read -P 0 8M 1M",
		}
		io(r.tcpURI(), verify...)
		io(r.unixURI(), "write -z 70001 60003", "discard 6M 1M", "write -f -P 9 7340033 77", "flush")
		io(r.unixURI(), "read -P 0xaa 69000 1001", "read -P 0 70001 60003", "read -P 0xaa 130004 1067", "read -P 0 6M 1M", "read -P 9 7340033 77")
		io(r.image, "read -P 1 1 510", "read -P 2 1000 4097", "read -P 4 1048575 3145731", "read -P 0 70001 60003", "read -P 9 7340033 77")
	})
}

// fioVerify runs four jobs over a device, each on its own quarter. They write
// at random with sizes from 4 KiB to 1 MiB and verify it.
func fioVerify(t *testing.T, uri string, size int64, more ...string) {
	t.Helper()
	const least = 100 // requests of either kind, by each job
	fioVerifies(t, least, uri, size, more...)
}

func fioVerifies(t *testing.T, least int64, uri string, size int64, more ...string) {
	t.Helper()
	out := run(t, append([]string{"fio", "--name=verify", "--ioengine=nbd", "--uri=" + uri, "--rw=randrw", "--rwmixwrite=60",
		"--bssplit=4k/60:8k/10:64k/20:1m/10", "--iodepth=16", "--numjobs=4",
		fmt.Sprintf("--size=%d", size/4), fmt.Sprintf("--offset_increment=%d", size/4),
		"--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--output-format=json"}, more...)...)
	var report struct {
		Jobs []struct {
			Error int
			Read  struct{ Total_ios int64 }
			Write struct{ Total_ios int64 }
		}
	}
	if err := json.Unmarshal([]byte(out[strings.IndexByte(out, '{'):]), &report); err != nil || len(report.Jobs) != 4 {
		t.Fatalf("fio's report: %v\n%s", err, out)
	}
	for _, j := range report.Jobs {
		if j.Error != 0 || j.Read.Total_ios < least || j.Write.Total_ios < least {
			t.Errorf("fio: %+v", j)
		}
	}
}

func TestFioVerifiesMixedSizesAndJobs(t *testing.T) {
	bothKeyModes(t, func(t *testing.T, r *rig) {
		fioVerify(t, r.unixURI(), deviceSize)
		fioVerify(t, r.tcpURI(), deviceSize, "--randseed=7")
		back := filepath.Join(t.TempDir(), "back")
		run(t, "nbdcopy", r.unixURI(), back)
		if sumOf(t, back) != sumOf(t, r.image) {
			t.Error("what the client reads is not what the server's file holds")
		}
	})
}

func TestFioTrims(t *testing.T) {
	r := newRig(t, rigOptions{size: deviceSize})
	run(t, "nbdcopy", "--flush", randomFile(t, deviceSize), r.unixURI())
	run(t, "fio", "--name=trim", "--ioengine=nbd", "--uri="+r.unixURI(), "--rw=randtrim", "--bs=64k", "--iodepth=16", "--size=128m")
	out := run(t, "qemu-io", "-f", "raw", "-c", fmt.Sprintf("read -P 0 0 %d", deviceSize), r.unixURI())
	if strings.Contains(out, "fail") {
		t.Errorf("trimmed ranges do not read as zeroes: %s", out)
	}
	st, err := os.Stat(r.image)
	if err != nil || st.Size() != deviceSize {
		t.Errorf("the server's file has %d bytes, %v", st.Size(), err)
	}
}

// TestSeveralDevicesAtOnce has devices of two servers, over one path and over
// several, under load together.
func TestSeveralDevicesAtOnce(t *testing.T) {
	l := lab.New(t)
	const n, size = 3, 64 << 20
	var dir string
	for i := range n {
		dir = l.Image(fmt.Sprintf("disk%d.img", i), size)
	}
	servers := []*lab.Server{
		l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Addrs: []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"}}),
		l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Extra: []string{"--always-invalidate=false"}}),
	}
	c := l.Client(lab.ClientOptions{Extra: []string{"--policy", "round-robin"}})
	var wg sync.WaitGroup
	for i := range n {
		d := l.Map(c, fmt.Sprintf("disk%d.img", i), servers[i%2])
		wg.Go(func() {
			t.Run(d.Path, func(t *testing.T) { fioVerify(t, c.URI(d.Name), size) })
		})
	}
	wg.Wait()
	sessions := sessionsOf(t, c)
	if len(sessions) != 2 {
		t.Fatalf("%d sessions, want one per server", len(sessions))
	}
	for _, s := range sessions {
		for _, p := range s.Paths {
			if p.TxBytes < 1<<20 {
				t.Errorf("path %s of session %s carried %d bytes only", p.Dst, s.Name, p.TxBytes)
			}
		}
	}
}
