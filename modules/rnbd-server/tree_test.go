package server

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/sdktest"
)

// Files are called directly here. How calls get through the kernel is
// ctltree's to test.

func (r *rig) at(path string) ctltree.Node {
	for place, n := range r.server.Tree() {
		if path == place {
			return n
		}
		if rest, ok := strings.CutPrefix(path, place+"/"); ok {
			return ctltree.Find(n, rest)
		}
	}
	return nil
}

func (r *rig) read(path string) string {
	r.t.Helper()
	f, ok := r.at(path).(*ctltree.File)
	if !ok {
		r.t.Fatalf("%s is no file", path)
	}
	text, err := f.Show()
	must(r.t, err)
	return text
}

func (r *rig) write(path, text string) error {
	r.t.Helper()
	f, ok := r.at(path).(*ctltree.File)
	if !ok || f.Store == nil {
		r.t.Fatalf("%s is no file to write", path)
	}
	return f.Store(r.t.Context(), []byte(text))
}

func (r *rig) names(path string) string {
	r.t.Helper()
	d, ok := r.at(path).(ctltree.Dir)
	if !ok {
		return "none"
	}
	return strings.Join(d.List(), " ")
}

// exported has "dir/vol" open read-write by session s1 and read-only by s2.
func exported(t *testing.T) (r *rig, s1, s2 *initiator) {
	mem := newMemory()
	mem.add("dir/vol", 1<<20)
	r = newRig(t, mem)
	s1, s2 = r.connect("s1"), r.connect("s2")
	_, err := s1.open("dir/vol", blk.ReadWrite)
	must(t, err)
	_, err = s2.open("dir/vol", blk.ReadOnly)
	must(t, err)
	return r, s1, s2
}

func TestTreeReads(t *testing.T) {
	r, _, _ := exported(t)
	client := regexp.MustCompile(`ip:[0-9.]+`).FindString(r.names("class/rtrs-server/s1/paths"))
	path := "class/rtrs-server/s1/paths/" + client + "@ip:10.0.0.1/"
	oldPath := "kernel/ibtrs_server/s1/paths/" + client + "/"
	for _, c := range []struct{ number, path, want string }{
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s1/access_mode", "rw"},
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s2/access_mode", "ro"},
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s1/read_only", "0"},
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s2/read_only", "1"},
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s1/mapping_path", "dir/vol"},
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s1/force_close", "Usage: echo 1 > force_close"},
		{"R-162", "kernel/ibnbd_server/devices/dir!vol/sessions/s1/read_only", "0"},
		{"R-162", "kernel/ibnbd_server/devices/dir!vol/sessions/s2/mapping_path", "dir/vol"},
		{"R-165", path + "hca_name", "srv"},
		{"R-165", path + "hca_port", "1"},
		{"R-165", path + "src_addr", client},
		{"R-165", path + "dst_addr", "ip:10.0.0.1"},
		{"R-165", path + "disconnect", "Usage: echo 1 > disconnect"},
		{"R-165", oldPath + "disconnect", "Usage: echo 1 > disconnect"},
		{"R-165", oldPath + "hca_name", "srv"},
		{"R-165", oldPath + "stats/reset_all", "echo 0 to reset all statistics"},
		{"R-167", "module/rnbd_server/parameters/port_nr", "1234"},
		{"R-167", "module/rnbd_server/parameters/dev_search_path", "/"},
		{"R-167", "module/rtrs_server/parameters/max_chunk_size", "131072"},
		{"R-167", "module/rtrs_server/parameters/sess_queue_depth", "16"}, // the rig's; the default is tested below
		{"R-167", "module/rtrs_server/parameters/always_invalidate", "Y"},
	} {
		t.Run(c.number+" "+c.path, func(t *testing.T) {
			if got := r.read(c.path); got != c.want+"\n" {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
	for _, c := range []struct{ number, path, want string }{
		{"R-165", path + "stats/rdma", `^\d+ \d+ \d+ \d+\n$`},
		{"R-165", oldPath + "stats/rdma", `^\d+ \d+ \d+ \d+ \d+\n$`},
		{"R-165", oldPath + "stats/wc_completion", `^\d+ \d+ \d+\n$`},
	} {
		t.Run(c.number+" "+c.path, func(t *testing.T) {
			if got := r.read(c.path); !regexp.MustCompile(c.want).MatchString(got) {
				t.Errorf("%q, want %s", got, c.want)
			}
		})
	}
	for _, c := range []struct{ number, path, want string }{
		{"R-162", "class/rnbd-server/ctl", "devices"},
		{"R-162", "class/rnbd-server/ctl/devices", "dir!vol"},
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol", "block_dev sessions size stat"}, // of a name without a node
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions", "s1 s2"},
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s1", "access_mode force_close mapping_path read_only"},
		{"R-165", "class/rtrs-server", "s1 s2"},
		{"R-166", "class/rtrs-server/s1/paths", client + "@ip:10.0.0.1"},
		{"R-165", "class/rtrs-server/s1/paths/" + client + "@ip:10.0.0.1", "disconnect dst_addr hca_name hca_port src_addr stats"},
		{"R-165", "class/rtrs-server/s1/paths/" + client + "@ip:10.0.0.1/stats", "rdma"},
		{"R-165", "kernel/ibtrs_server/s1/paths", client},
		{"R-165", "kernel/ibtrs_server/s1/paths/" + client + "/stats", "rdma reset_all wc_completion"},
	} {
		t.Run(c.number+" entries of "+c.path, func(t *testing.T) {
			if got := r.names(c.path); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
		})
	}
}

func TestTreeWrites(t *testing.T) {
	r, _, _ := exported(t)
	client := regexp.MustCompile(`ip:[0-9.]+`).FindString(r.names("class/rtrs-server/s1/paths"))
	path := "class/rtrs-server/s1/paths/" + client + "@ip:10.0.0.1/"
	oldPath := "kernel/ibtrs_server/s1/paths/" + client + "/"
	for _, c := range []struct {
		number, path, text string
		want               error
	}{
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s1/force_close", "0", syscall.EINVAL},
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s1/force_close", "", syscall.EINVAL},
		{"R-162", "class/rnbd-server/ctl/devices/dir!vol/sessions/s1/force_close", "force", syscall.EINVAL},
		{"R-164", path + "stats/rdma", "1\n", nil},
		{"R-164", path + "stats/rdma", "0", syscall.EINVAL},
		{"R-164", path + "stats/rdma", "", syscall.EINVAL},
		{"R-164", oldPath + "stats/rdma", "0", nil},
		{"R-164", oldPath + "stats/rdma", "1", syscall.EINVAL},
		{"R-164", oldPath + "stats/wc_completion", "0\n", nil},
		{"R-164", oldPath + "stats/wc_completion", "2", syscall.EINVAL},
		{"R-164", oldPath + "stats/reset_all", "0", nil},
		{"R-164", oldPath + "stats/reset_all", "1", syscall.EINVAL},
		{"R-165", path + "disconnect", "0", syscall.EINVAL},
		{"R-165", path + "disconnect", "", syscall.EINVAL},
	} {
		t.Run(fmt.Sprintf("%s %s %q", c.number, c.path, c.text), func(t *testing.T) {
			err := r.write(c.path, c.text)
			if c.want == nil && err != nil || !errors.Is(err, c.want) {
				t.Errorf("got %v, want %v", err, c.want)
			}
		})
	}
}

func TestR162_ForceClose(t *testing.T) {
	r, s1, _ := exported(t)
	const dir = "class/rnbd-server/ctl/devices/dir!vol/sessions"
	must(t, r.write(dir+"/s1/force_close", "1\n"))
	if errno := s1.bare(0, blk.Flush, 0, 0, 0, false); errno != blk.ENOTCONN {
		t.Errorf("I/O after the forced close: errno %d, want ENOTCONN", errno)
	}
	if got := r.names(dir); got != "s2" {
		t.Errorf("sessions: %s", got)
	}
	must(t, r.write(dir+"/s2/force_close", "1"))
	if got := r.names("class/rnbd-server/ctl/devices"); got != "" {
		t.Errorf("a device that nobody has open is shown: %s", got)
	}
}

func TestR165_DisconnectDoesNotWait(t *testing.T) {
	r, s1, _ := exported(t)
	r.mem.setHold(true)
	s1.start(false, 0, ioMessage(0, blk.Flush, 0, 0, 0))
	eventually(t, "the plugin has the request", func() bool { return len(r.mem.requests()) > 0 })
	paths := "class/rtrs-server/s1/paths"
	name := r.names(paths)
	start := time.Now()
	must(t, r.write(paths+"/"+name+"/disconnect", "1\n"))
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("disconnect took %s", took)
	}
	// The path is there until its request has ended.
	if got := r.names(paths); got != name {
		t.Errorf("paths while a request is under way: %q", got)
	}
	r.mem.setHold(false)
}

func TestR165_CountsAndReset(t *testing.T) {
	r, s1, _ := exported(t)
	if errno := s1.rw(0, blk.Write, 0, make([]byte, 4096)); errno != blk.OK {
		t.Fatal(errno)
	}
	name := r.names("class/rtrs-server/s1/paths")
	file := "class/rtrs-server/s1/paths/" + name + "/stats/rdma"
	var reads, readBytes, writes, writeBytes int
	if _, err := fmt.Sscan(r.read(file), &reads, &readBytes, &writes, &writeBytes); err != nil || writes != 1 || writeBytes < 4096 {
		t.Errorf("%q, %v; want one write of 4096 bytes and a message", r.read(file), err)
	}
	must(t, r.write(file, "1"))
	if got := r.read(file); got != "0 0 0 0\n" {
		t.Errorf("after the reset %q", got)
	}
}

// TestR162_NodesByName: a file is shown under its path and leads there, a block
// device under the kernel's name.
func TestR162_NodesByName(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "disk.img"), make([]byte, 1<<20), 0o644))
	mem := newMemory()
	mem.names = plugin.NamesPath
	mem.add("disk.img", 1<<20)
	r := newRig(t, mem, func(c *Config) { c.SearchPath, c.Rules = dir, nil })
	s := r.connect("s")
	_, err := s.open("disk.img", blk.ReadWrite)
	must(t, err)
	id := strings.ReplaceAll(filepath.Join(dir, "disk.img"), "/", "!")
	if got := r.names("class/rnbd-server/ctl/devices"); got != id {
		t.Fatalf("devices %q, want %q", got, id)
	}
	// The authors' tool closes a device by the last part of this link.
	if l, _ := r.at("class/rnbd-server/ctl/devices/" + id + "/block_dev").(ctltree.Link); filepath.Join("devices", id, string(l)) != filepath.Join("devices", id) {
		t.Errorf("block_dev leads to %q", l)
	}
	if errno := s.rw(0, blk.Write, 0, make([]byte, 4096)); errno != blk.OK {
		t.Errorf("write: errno %d", errno)
	}
	if errno := s.rw(0, blk.Read, 0, make([]byte, 1024)); errno != blk.OK {
		t.Errorf("read: errno %d", errno)
	}
	if got := strings.Fields(r.read("class/rnbd-server/ctl/devices/" + id + "/stat")); len(got) != 17 || got[2] != "2" || got[6] != "8" {
		t.Errorf("stat: %q, want 2 sectors read and 8 written", got)
	}
	if got := r.read("class/rnbd-server/ctl/devices/" + id + "/size"); got != "2048\n" {
		t.Errorf("size: %q", got)
	}
	if got := r.read("module/rnbd_server/parameters/dev_search_path"); got != dir+"\n" {
		t.Errorf("dev_search_path %q", got)
	}
	for node, want := range map[nodeID]string{{dev: 0xffff}: "", {dev: 5, ino: 7}: "", {opaque: "x"}: ""} {
		if got := kernelName(node); got != want {
			t.Errorf("kernel's name of %v: %q", node, got)
		}
	}
	nodes, _ := filepath.Glob("/sys/dev/block/*")
	if len(nodes) == 0 {
		t.Skip("this system has no block device")
	}
	var major, minor uint64
	fmt.Sscanf(filepath.Base(nodes[0]), "%d:%d", &major, &minor)
	target, err := os.Readlink(nodes[0])
	must(t, err)
	block := &device{key: deviceKey{id: nodeID{dev: major<<8 | minor}}, path: "/dev/whatever"}
	if got := exportName(block); got != filepath.Base(target) {
		t.Errorf("block device %s is shown as %q, want %q", nodes[0], got, filepath.Base(target))
	}
	// /sys/class and /sys/block are where this tree is mounted for the kernel's tools.
	if got := string(nodeLink(block.key.id)); got != filepath.Join("/sys/dev/block", target) {
		t.Errorf("it leads to %q", got)
	}
}

func TestR167_ParametersOfTheServer(t *testing.T) {
	def := DefaultConfig()
	if def.ChunkSize != 131072 || def.QueueDepth != 512 || !def.AlwaysInvalidate || def.SearchPath != "" {
		t.Errorf("defaults: chunks of %d, depth %d, always invalidate %t, search path %q", def.ChunkSize, def.QueueDepth, def.AlwaysInvalidate, def.SearchPath)
	}
	for _, c := range []struct {
		name         string
		chunk, depth int
	}{
		{"chunk of one page", 4096, 512},
		{"chunk that is no multiple of a page", 5000, 512},
		{"no chunk", 0, 512},
		{"no depth", 131072, 0},
		{"depth beyond 16 bits", 8192, 65536},
		{"more than an immediate can name", 131072, 4096},
	} {
		cfg := def
		cfg.Plugins = []PluginConfig{{Name: "memory", Path: "in process"}}
		cfg.NewRing, cfg.Launch = newRig(t, newMemory()).server.cfg.NewRing, newRig(t, newMemory()).server.cfg.Launch
		cfg.ChunkSize, cfg.QueueDepth = c.chunk, c.depth
		s, err := New(t.Context(), cfg)
		if err == nil {
			s.Close(t.Context())
		}
		if !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%s: %v, want EINVAL", c.name, err)
		}
	}
}

// eventually waits until a condition holds.
var eventually = sdktest.Eventually
