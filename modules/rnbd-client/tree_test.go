package client

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// treeRig is a client's tree without a mount: files are called directly. How
// calls get through the kernel is ctltree's to test.
type treeRig struct {
	t    *testing.T
	s    *target
	c    *Client
	root map[string]ctltree.Node
}

func newTreeRig(t *testing.T, change ...func(*Config)) *treeRig {
	s := newTarget(t, 1<<20)
	c := s.newClient(change...)
	return &treeRig{t, s, c, controlTree{c: c, frontend: "none"}.rootNodes()}
}

// at finds a node, over links too.
func (r *treeRig) at(path string) ctltree.Node {
	for place, n := range r.root {
		if path == place {
			return n
		}
		if rest, ok := strings.CutPrefix(path, place+"/"); ok {
			return ctltree.Find(n, rest)
		}
	}
	return nil
}

func (r *treeRig) read(path string) string {
	r.t.Helper()
	f, ok := r.at(path).(*ctltree.File)
	if !ok {
		r.t.Fatalf("%s is no file", path)
	}
	text, err := f.Show()
	if err != nil {
		r.t.Fatalf("%s: %v", path, err)
	}
	return text
}

func (r *treeRig) write(path, text string) error {
	r.t.Helper()
	f, ok := r.at(path).(*ctltree.File)
	if !ok || f.Store == nil {
		r.t.Fatalf("%s is no file to write", path)
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), 20*time.Second)
	defer cancel()
	return f.Store(ctx, []byte(text))
}

func (r *treeRig) names(path string) string {
	r.t.Helper()
	d, ok := r.at(path).(ctltree.Dir)
	if !ok {
		r.t.Fatalf("%s is no directory", path)
	}
	return strings.Join(d.List(), " ")
}

// mapped has /dev/vol as rnbd0 in session s, over two paths.
func mappedRig(t *testing.T) *treeRig {
	r := newTreeRig(t, noHeartbeats)
	must(t, r.write("class/rnbd-client/ctl/map_device", "sessname=s path=ip:10.0.0.7@ip:10.0.0.1 path=ip:10.0.1.7@ip:10.0.1.1 device_path=/dev/vol\n"))
	return r
}

func TestTreeReads(t *testing.T) {
	r := mappedRig(t)
	path := "class/rtrs-client/s/paths/ip:10.0.0.7@ip:10.0.0.1/"
	oldPath := "kernel/ibtrs_client/s/paths/ip:10.0.0.1/"
	cpus := strings.Repeat(`\d+ `, rtrs.PossibleCPUs()) // each with a blank behind it
	for _, c := range []struct{ number, path, want string }{
		{"R-160", "class/rnbd-client/ctl/map_device", mapUsage + "\n"},
		{"R-160", "kernel/ibnbd_client/map_device", oldMapUsage + "\n"},
		{"R-161", "block/rnbd0/rnbd/unmap_device", "Usage: echo <normal|force> > unmap_device\n"},
		{"R-161", "block/rnbd0/rnbd/resize", "Usage: echo <new size in sectors> > resize\n"},
		{"R-161", "block/rnbd0/rnbd/remap_device", "Usage: echo <1> > remap_device\n"},
		{"R-161", "block/rnbd0/rnbd/mapping_path", "/dev/vol\n"},
		{"R-161", "block/rnbd0/rnbd/state", "open\n"},
		{"R-161", "block/rnbd0/rnbd/session", "s\n"},
		{"R-161", "block/rnbd0/rnbd/access_mode", "rw\n"},
		{"R-161", "block/rnbd0/rnbd/nr_poll_queues", "0\n"},
		{"R-161", "block/rnbd0/ibnbd_client/state", "open\n"},
		{"R-161", "block/rnbd0/ibnbd/session", "s\n"},
		{"R-161", "block/rnbd0/ibnbd_client/mapping_path", "/dev/vol\n"},
		{"R-161", "block/rnbd0/size", "2048\n"},
		{"R-161", "block/rnbd0/ro", "0\n"},
		{"R-163", "class/rtrs-client/s/add_path", today.addUsage + "\n"},
		{"R-163", "class/rtrs-client/s/max_reconnect_attempts", "-1\n"},
		{"R-163", "class/rtrs-client/s/mpath_policy", "min-inflight (MI: 1)\n"},
		{"R-163", "kernel/ibtrs_client/s/mp_policy", "min-inflight (MI: 1)\n"},
		{"R-163", "kernel/ibtrs_client/s/max_reconnect_attempts", "-1\n"},
		{"R-163", path + "state", "connected\n"},
		{"R-163", path + "reconnect", "Usage: echo 1 > reconnect\n"},
		{"R-163", path + "disconnect", "Usage: echo 1 > disconnect\n"},
		{"R-163", path + "remove_path", "Usage: echo 1 > remove_path\n"},
		{"R-163", path + "hca_name", "clt\n"},
		{"R-163", path + "hca_port", "1\n"},
		{"R-163", path + "src_addr", "ip:10.0.0.7\n"},
		{"R-163", path + "dst_addr", "ip:10.0.0.1\n"},
		{"R-163", path + "cur_latency", "0 ns\n"},
		{"R-163", path + "stats/reconnects", "0 0\n"},
		{"R-163", path + "stats/reset_all", "echo 1 to reset all statistics\n"},
		{"R-163", oldPath + "state", "connected\n"},
		{"R-163", oldPath + "stats/reset_all", "echo 0 to reset all statistics\n"},
	} {
		t.Run(c.number+" "+c.path, func(t *testing.T) {
			if got := r.read(c.path); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
	for _, c := range []struct{ number, path, want string }{
		{"R-163", path + "stats/cpu_migration_from", "^" + cpus + "\n$"},
		{"R-163", path + "stats/cpu_migration_to", "^" + cpus + "\n$"},
		{"R-163", oldPath + "stats/cpu_migration", "^from: " + strings.TrimSpace(cpus) + "\nto: " + strings.TrimSpace(cpus) + "\n$"},
		{"R-163", path + "stats/rdma", `^\d+ \d+ \d+ \d+ \d+ \d+\n$`},
		{"R-163", oldPath + "stats/rdma", `^\d+ \d+ \d+ \d+ \d+ \d+\n$`},
		{"R-163", oldPath + "stats/sg_entries", `^entries: pump0 pump1\n0: \d+ \d+\n1: \d+ \d+\n$`},
		{"R-163", oldPath + "stats/wc_completion", `^\d+ \d+\n$`},
		{"R-163", oldPath + "stats/rdma_lat", `^1 ms: \d+ \d+\n2 ms: \d+ \d+\n4 ms: (.*\n)+65536 ms: \d+ \d+\n>= 65536 ms: \d+ \d+\nmaximum ms: \d+ \d+\n$`},
	} {
		t.Run(c.number+" "+c.path, func(t *testing.T) {
			if got := r.read(c.path); !regexp.MustCompile(c.want).MatchString(got) {
				t.Errorf("%q, want %s", got, c.want)
			}
		})
	}
	for _, c := range []struct{ number, path, want string }{
		{"R-160", "class/rnbd-client/ctl", "devices map_device"},
		{"R-160", "class/rnbd-client/ctl/devices", "!dev!vol@s"},
		{"R-160", "kernel/ibnbd_client/devices", "!dev!vol"},
		{"R-161", "block", "rnbd0"},
		{"R-161", "block/rnbd0/rnbd", "access_mode mapping_path nr_poll_queues remap_device resize session state unmap_device"},
		{"R-163", "class/rtrs-client", "s"},
		{"R-163", "class/rtrs-client/s", "add_path max_reconnect_attempts mpath_policy paths"},
		{"R-166", "class/rtrs-client/s/paths", "ip:10.0.0.7@ip:10.0.0.1 ip:10.0.1.7@ip:10.0.1.1"},
		{"R-163", "kernel/ibtrs_client/s/paths", "ip:10.0.0.1 ip:10.0.1.1"},
		{"R-163", "class/rtrs-client/s/paths/ip:10.0.0.7@ip:10.0.0.1",
			"cur_latency disconnect dst_addr hca_name hca_port reconnect remove_path src_addr state stats"},
		{"R-163", "class/rtrs-client/s/paths/ip:10.0.0.7@ip:10.0.0.1/stats",
			"cpu_migration_from cpu_migration_to rdma reconnects reset_all"},
	} {
		t.Run(c.number+" entries of "+c.path, func(t *testing.T) {
			if got := r.names(c.path); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
	for _, p := range []string{"class/rnbd-client/ctl/devices/!dev!vol@s", "kernel/ibnbd_client/devices/!dev!vol"} {
		if l, _ := r.at(p).(ctltree.Link); l != "../../../block/rnbd0" {
			t.Errorf("%s leads to %q", p, l)
		}
	}
}

// TestTreeWrites: rows that change nothing, so that they may share a rig.
func TestTreeWrites(t *testing.T) {
	r := mappedRig(t)
	const (
		path    = "class/rtrs-client/s/paths/ip:10.0.0.7@ip:10.0.0.1/"
		oldPath = "kernel/ibtrs_client/s/paths/ip:10.0.0.1/"
		mapDev  = "class/rnbd-client/ctl/map_device"
		oldMap  = "kernel/ibnbd_client/map_device"
	)
	type row struct {
		number, path, text string
		want               error
	}
	rows := []row{
		{"R-160", mapDev, "", syscall.EINVAL},
		{"R-160", mapDev, "sessname=s", syscall.EINVAL},
		{"R-160", mapDev, "sessname=s device_path=/dev/vol", syscall.EEXIST},
		{"R-160", mapDev, "sessname=s device_path=/dev/vol path=ip:10.0.0.1", syscall.EEXIST},
		{"R-160", mapDev, "sessname=other device_path=/dev/vol", syscall.ENXIO},
		{"R-160", mapDev, "sessname=other device_path=/dev/vol path=10.0.0.1", syscall.EPROTONOSUPPORT},
		{"R-160", mapDev, "sessname=other device_path=/dev/vol dest_port=9 path=ip:10.0.0.1", syscall.ECONNRESET},
		{"R-160", mapDev, "sessname=other device_path=/dev/vol path=ip:10.0.0.1 path=ip:10.0.0.1", syscall.EEXIST},
		{"R-160", mapDev, "sessname=s device_path=x nr_poll_queues=1", syscall.EINVAL},
		{"R-160", mapDev, "sessname=s device_path=x io_mode=blockio", syscall.EINVAL},
		{"R-160", mapDev, "sessname=s device_path=x input_mode=mq", syscall.EINVAL},
		{"R-160", mapDev, "sessname=t path=ip:10.0.0.1%none device_path=x", syscall.EINVAL},
		{"R-160", oldMap, "sessname=s device_path=x io_mode=paper", syscall.EINVAL},
		{"R-160", oldMap, "sessname=s device_path=/dev/vol io_mode=blockio input_mode=mq", syscall.EEXIST},
		{"R-161", "block/rnbd0/rnbd/unmap_device", "", syscall.EINVAL},
		{"R-161", "block/rnbd0/rnbd/unmap_device", "1", syscall.EINVAL},
		{"R-161", "block/rnbd0/rnbd/unmap_device", "Normal", syscall.EINVAL},
		{"R-161", "block/rnbd0/rnbd/unmap_device", "normal please", syscall.EINVAL},
		{"R-161", "block/rnbd0/rnbd/resize", "x", syscall.EINVAL},
		{"R-161", "block/rnbd0/rnbd/resize", "", syscall.EINVAL},
		{"R-161", "block/rnbd0/rnbd/resize", "-1", syscall.EINVAL},
		{"R-161", "block/rnbd0/rnbd/resize", "1_000", syscall.EINVAL},
		{"R-161", "block/rnbd0/rnbd/resize", "18446744073709551616", syscall.ERANGE},
		{"R-161", "block/rnbd0/rnbd/resize", "2048\n", nil},
		{"R-161", "block/rnbd0/rnbd/resize", "0x800", nil},
		{"R-161", "block/rnbd0/rnbd/resize", "04000", nil},
		{"R-161", "block/rnbd0/rnbd/remap_device", "2", syscall.EINVAL},
		{"R-161", "block/rnbd0/rnbd/remap_device", "1", syscall.EALREADY},
		{"R-163", "class/rtrs-client/s/add_path", "", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/add_path", "10.0.0.1", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/add_path", "ip:10.0.0.1:99", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/add_path", "ip:x@ip:10.0.0.1", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/add_path", "ip:10.0.0.7@ip:10.0.0.1\n", syscall.EEXIST},
		{"R-163", "class/rtrs-client/s/add_path", "ip:10.0.0.7,ip:10.0.0.1\n", syscall.EEXIST},
		{"R-163", "class/rtrs-client/s/add_path", "ip:10.9.9.9", syscall.ECONNRESET},
		{"R-163", "class/rtrs-client/s/max_reconnect_attempts", "-2", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/max_reconnect_attempts", "10000", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/max_reconnect_attempts", "many", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/max_reconnect_attempts", "", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/max_reconnect_attempts", "99999999999", syscall.ERANGE},
		{"R-163", "class/rtrs-client/s/mpath_policy", "best", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/mpath_policy", "3", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/mpath_policy", "", syscall.EINVAL},
		{"R-163", "class/rtrs-client/s/mpath_policy", "rrr", syscall.EINVAL},
		{"R-163", path + "reconnect", "2", syscall.EINVAL},
		{"R-163", path + "disconnect", "", syscall.EINVAL},
		{"R-163", path + "disconnect", "11", syscall.EINVAL},
		{"R-163", path + "remove_path", "yes", syscall.EINVAL},
	}
	for _, file := range []string{"cpu_migration_from", "cpu_migration_to", "reconnects", "rdma", "reset_all"} {
		f := path + "stats/" + file
		rows = append(rows, row{"R-164", f, "1", nil}, row{"R-164", f, "1\n", nil}, row{"R-164", f, "0", syscall.EINVAL}, row{"R-164", f, "2", syscall.EINVAL}, row{"R-164", f, "", syscall.EINVAL}, row{"R-164", f, "11", syscall.EINVAL})
	}
	for _, file := range []string{"cpu_migration", "reconnects", "rdma", "sg_entries", "rdma_lat", "wc_completion", "reset_all"} {
		f := oldPath + "stats/" + file
		rows = append(rows, row{"R-164", f, "0", nil}, row{"R-164", f, "0\n", nil}, row{"R-164", f, "1", syscall.EINVAL}, row{"R-164", f, "", syscall.EINVAL})
	}
	for _, c := range rows {
		t.Run(fmt.Sprintf("%s %s %q", c.number, c.path, c.text), func(t *testing.T) {
			err := r.write(c.path, c.text)
			if c.want == nil && err != nil || !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
	if got := r.names("block"); got != "rnbd0" {
		t.Errorf("devices after all this: %s", got)
	}
	if got := r.names("class/rtrs-client"); got != "s" {
		t.Errorf("sessions after all this: %s", got)
	}
}

func TestR163_PolicyAndAttemptsAreSet(t *testing.T) {
	r := mappedRig(t)
	for _, file := range []string{"class/rtrs-client/s/mpath_policy", "kernel/ibtrs_client/s/mp_policy"} {
		for text, want := range map[string]string{
			"0": "round-robin (RR: 0)\n", "1\n": "min-inflight (MI: 1)\n", "2": "min-latency (ML: 2)\n",
			"rr": "round-robin (RR: 0)\n", "MI": "min-inflight (MI: 1)\n", "ml\n": "min-latency (ML: 2)\n",
			"Round-Robin": "round-robin (RR: 0)\n", "min-inflight please": "min-inflight (MI: 1)\n",
		} {
			must(t, r.write(file, text))
			if got := r.read(file); got != want {
				t.Errorf("%s: after %q it is %q", file, text, got)
			}
		}
	}
	for _, n := range []string{"-1", "0", "7", "9999"} {
		must(t, r.write("class/rtrs-client/s/max_reconnect_attempts", n+"\n"))
		if got := r.read("class/rtrs-client/s/max_reconnect_attempts"); got != n+"\n" {
			t.Errorf("after %s it is %q", n, got)
		}
	}
}

func TestR161_LifeOfADevice(t *testing.T) {
	r := mappedRig(t)
	const dir = "block/rnbd0/rnbd/"
	held := r.at(dir + "state").(*ctltree.File)
	unmap := r.at(dir + "unmap_device").(*ctltree.File)

	must(t, r.write(dir+"resize", "1024"))
	if got := r.read("block/rnbd0/size"); got != "1024\n" {
		t.Errorf("size after resize: %q", got)
	}
	r.s.kill()
	eventually(t, "the device is closed", func() bool { return r.read(dir+"state") == "closed\n" })
	for _, c := range []struct {
		file, text string
		want       error
	}{
		{"remap_device", "1", syscall.ECONNABORTED},
		{"resize", "2048", syscall.ENOENT},
		{"session", "", nil},
	} {
		if c.want == nil {
			continue
		}
		if err := r.write(dir+c.file, c.text); !errors.Is(err, c.want) {
			t.Errorf("%s of a closed device: %v, want %v", c.file, err, c.want)
		}
	}
	if err := r.write("class/rnbd-client/ctl/map_device", "sessname=s device_path=other"); !errors.Is(err, syscall.ECONNABORTED) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("mapping over a session without paths: %v", err)
	}
	r.s.start()
	eventually(t, "the device is open", func() bool { return r.read(dir+"state") == "open\n" })
	must(t, r.write(dir+"unmap_device", "normal\n"))
	if got := r.names("block"); got != "" {
		t.Errorf("devices: %q", got)
	}
	if text, err := held.Show(); err != nil || text != "unmapped\n" {
		t.Errorf("state in a file that was kept open: %q, %v", text, err)
	}
	if err := unmap.Store(t.Context(), []byte("normal")); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("unmap through a file that was kept open: %v, want ENODEV", err)
	}
}

func TestR161_UnmappingTwiceIsEALREADY(t *testing.T) {
	r := mappedRig(t)
	d, io := r.holdRequest()
	done := make(chan error, 1)
	unmap := r.at("block/rnbd0/rnbd/unmap_device").(*ctltree.File)
	second := r.at("block/rnbd0/ibnbd/unmap_device").(*ctltree.File)
	began := time.Now()
	go func() { done <- unmap.Store(context.Background(), []byte("force")) }()
	eventually(t, "the device is being unmapped", func() bool { return d.State() == Unmapped })
	err := second.Store(t.Context(), []byte("normal"))
	late := errors.Is(err, syscall.ENODEV) && time.Since(began) >= forcedClose // the first has ended
	if !errors.Is(err, syscall.EALREADY) && !late {
		t.Errorf("second unmap: %v, want EALREADY", err)
	}
	r.s.releaseAll(blk.OK)
	if err := <-done; err != nil {
		t.Error(err)
	}
	_ = io
}

// holdRequest has one read under way at the target.
func (r *treeRig) holdRequest() (*Device, *IO) {
	r.t.Helper()
	d := r.c.Devices()[0]
	io, err := d.NewIO(0, 0, 8)
	must(r.t, err)
	r.s.set(func() { r.s.hold = true })
	if !io.Submit(Request{Op: blk.Read, Len: 512}) {
		r.t.Fatal("submit refused")
	}
	io.Flush()
	eventually(r.t, "the read is there", func() (there bool) { r.s.set(func() { there = len(r.s.held) == 1 }); return there })
	return d, io
}

func TestR160_PollQueuesKeepASessionToOneDevice(t *testing.T) {
	r := newTreeRig(t)
	const file = "class/rnbd-client/ctl/map_device"
	must(t, r.write(file, "sessname=p path=ip:10.0.0.1 device_path=a nr_poll_queues=1"))
	if got := r.read("block/rnbd0/rnbd/nr_poll_queues"); got != "1\n" {
		t.Errorf("nr_poll_queues %q", got)
	}
	for _, line := range []string{"sessname=p device_path=b", "sessname=p device_path=b nr_poll_queues=1"} {
		if err := r.write(file, line); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%q: %v, want EINVAL", line, err)
		}
	}
}

func TestR163_PathsComeAndGo(t *testing.T) {
	r := newTreeRig(t)
	must(t, r.write("class/rnbd-client/ctl/map_device", "sessname=s path=ip:10.0.0.7@ip:10.0.0.1 device_path=v access_mode=ro"))
	if got := r.read("block/rnbd0/rnbd/access_mode") + r.read("block/rnbd0/ro"); got != "ro\n1\n" {
		t.Errorf("access mode and ro: %q", got)
	}
	must(t, r.write("class/rtrs-client/s/add_path", "ip:10.0.1.7@ip:10.0.1.1"))
	const second = "class/rtrs-client/s/paths/ip:10.0.1.7@ip:10.0.1.1/"
	if got := r.read(second + "state"); got != "connected\n" {
		t.Errorf("the new path is %q", got)
	}
	must(t, r.write(second+"disconnect", "1\n"))
	if got := r.read(second + "state"); got != "disconnected\n" {
		t.Errorf("after disconnect: %q", got)
	}
	must(t, r.write(second+"disconnect", "1"))
	must(t, r.write(second+"reconnect", "1"))
	// An attempt fails where the server has not closed the old path yet.
	if got := r.read(second+"state") + r.read(second+"stats/reconnects"); !strings.HasPrefix(got, "connected\n1 ") {
		t.Errorf("after reconnect: %q", got)
	}
	must(t, r.write(second+"stats/reconnects", "1"))
	if got := r.read(second + "stats/reconnects"); got != "0 0\n" {
		t.Errorf("after the reset: %q", got)
	}
	kept := r.at(second + "state").(*ctltree.File)
	must(t, r.write(second+"remove_path", "1"))
	if _, err := kept.Show(); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("state of a path that is gone: %v", err)
	}
	if got := r.names("class/rtrs-client/s/paths"); got != "ip:10.0.0.7@ip:10.0.0.1" {
		t.Errorf("paths: %s", got)
	}
	// The last path may go too; another revives the session.
	must(t, r.write("class/rtrs-client/s/paths/ip:10.0.0.7@ip:10.0.0.1/remove_path", "1"))
	eventually(t, "the device is closed", func() bool { return r.read("block/rnbd0/rnbd/state") == "closed\n" })
	eventually(t, "the server has forgotten it", func() bool { return len(r.s.rtrs.Sessions()) == 0 })
	must(t, r.write("kernel/ibtrs_client/s/add_path", "ip:10.0.1.7,ip:10.0.1.1"))
	eventually(t, "the device is open", func() bool { return r.read("block/rnbd0/rnbd/state") == "open\n" })
	if got := r.names("kernel/ibtrs_client/s/paths"); got != "ip:10.0.1.1" {
		t.Errorf("paths in the older place: %s", got)
	}
}

func TestR163_ReconnectOfAPathThatCannotIsENOTCONN(t *testing.T) {
	r := mappedRig(t)
	transport := r.c.Devices()[0].session.transport
	timing := transport.Timing()
	timing.ConnectTimeout = 500 * time.Millisecond
	must(t, transport.SetTiming(timing))
	const path = "class/rtrs-client/s/paths/ip:10.0.0.7@ip:10.0.0.1/"
	r.s.kill()
	eventually(t, "the path is lost", func() bool { return r.read(path+"state") == "disconnected\n" })
	eventually(t, "ENOTCONN", func() bool { // EBUSY while an attempt is under way
		err := r.write(path+"reconnect", "1")
		if !errors.Is(err, syscall.ENOTCONN) && !errors.Is(err, syscall.EBUSY) {
			t.Fatalf("reconnect: %v", err)
		}
		return errors.Is(err, syscall.ENOTCONN)
	})
	if got := r.names("class/rtrs-client/s/paths"); got != "ip:10.0.0.7@ip:10.0.0.1 ip:10.0.1.7@ip:10.0.1.1" {
		t.Errorf("lost paths are called %s", got)
	}
	r.s.start()
}

// TestR166_NameOfALostPathStays: also where the system chose the source.
func TestR166_NameOfALostPathStays(t *testing.T) {
	r := newTreeRig(t)
	must(t, r.write("class/rnbd-client/ctl/map_device", "sessname=s path=ip:10.0.0.1 device_path=v"))
	before := r.names("class/rtrs-client/s/paths")
	if !regexp.MustCompile(`^ip:[0-9.]+@ip:10\.0\.0\.1$`).MatchString(before) {
		t.Errorf("the path is called %s", before)
	}
	must(t, r.write("class/rtrs-client/s/paths/"+before+"/disconnect", "1"))
	if after := r.names("class/rtrs-client/s/paths"); after != before {
		t.Errorf("the path was called %s, and after the loss %s", before, after)
	}
}

func TestR164_ResetOfCounts(t *testing.T) {
	r := mappedRig(t)
	io, err := r.c.Devices()[0].NewIO(0, 0, 8)
	must(t, err)
	for range 3 {
		do(t, io, Request{Op: blk.Write, Len: 4096})
	}
	const path = "class/rtrs-client/s/paths/ip:10.0.0.7@ip:10.0.0.1/stats/"
	const oldPath = "kernel/ibtrs_client/s/paths/ip:10.0.0.1/stats/"
	counts := func() (reads, writes, bytes int) {
		var readBytes, inflight, failed int
		if _, err := fmt.Sscan(r.read(path+"rdma"), &reads, &readBytes, &writes, &bytes, &inflight, &failed); err != nil {
			t.Fatal(err)
		}
		return reads, writes, bytes
	}
	if _, writes, bytes := counts(); writes != 3 || bytes != 3*(4096+32) && bytes < 3*4096 {
		t.Errorf("%d writes, %d bytes", writes, bytes)
	}
	if got := r.read(oldPath + "rdma"); got != r.read(path+"rdma") {
		t.Errorf("the older file says %q", got)
	}
	must(t, r.write(path+"rdma", "1"))
	if reads, writes, bytes := counts(); reads+writes+bytes != 0 {
		t.Errorf("after the reset %d reads, %d writes, %d bytes", reads, writes, bytes)
	}
	if r.read(oldPath+"rdma_lat") == "" || strings.Contains(r.read(oldPath+"wc_completion"), "0 0\n") {
		t.Errorf("the reset of rdma took others: %q", r.read(oldPath+"wc_completion"))
	}
	must(t, r.write(oldPath+"reset_all", "0"))
	if got := r.read(oldPath + "wc_completion"); got != "0 0\n" {
		t.Errorf("wc_completion after reset_all: %q", got)
	}
}

func TestLatencyTable(t *testing.T) {
	var d rtrs.PathDetails
	d.ReadLatency.Counts[0], d.ReadLatency.Counts[1], d.WriteLatency.Counts[16], d.WriteLatency.Counts[17] = 1, 2, 3, 4
	d.ReadLatency.Max, d.WriteLatency.Max = 1500*time.Microsecond, 70*time.Second
	lines := strings.Split(showLatency(&d), "\n")
	for i, want := range map[int]string{0: "1 ms: 1 0", 1: "2 ms: 2 0", 2: "4 ms: 0 0", 16: "65536 ms: 0 3", 17: ">= 65536 ms: 0 4", 18: "maximum ms: 2 70000"} {
		if i >= len(lines) || lines[i] != want {
			t.Errorf("line %d of %q, want %q", i, lines, want)
		}
	}
	if len(lines) != 19 {
		t.Errorf("%d lines", len(lines))
	}
}

// TestWriterGivesUp: a map that is interrupted leaves nothing.
func TestWriterGivesUp(t *testing.T) {
	r := newTreeRig(t)
	f := r.at("class/rnbd-client/ctl/map_device").(*ctltree.File)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := f.Store(ctx, []byte("sessname=s path=ip:10.0.0.1 device_path=v")); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if got := r.names("block") + r.names("class/rtrs-client"); got != "" {
		t.Errorf("left behind: %s", got)
	}
}
