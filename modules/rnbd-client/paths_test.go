package client

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/modules/rtrs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// savedPathsOf returns the paths in the state file, those of the next daemon.
func savedPathsOf(t *testing.T, name string) []string {
	t.Helper()
	saved, err := readState(name)
	must(t, err)
	if len(saved) != 1 {
		t.Fatalf("%d devices are written down, want 1", len(saved))
	}
	return saved[0].Paths
}

func TestPathsSurviveTheDaemon(t *testing.T) {
	const first, second = "10.0.0.1", "10.0.1.1:1234%loopback"
	for _, v := range []struct {
		name   string
		change func(*testing.T, *Client)
		want   []string
	}{
		{"none was added", func(*testing.T, *Client) {}, []string{first}},
		{"one was added by command", func(t *testing.T, c *Client) {
			addPath(t, c, second)
		}, []string{first, second}},
		{"one was added by a control file", func(t *testing.T, c *Client) {
			must(t, treeOf(t, c).write("class/rtrs-client/s/add_path", "ip:10.0.0.7@ip:10.0.1.1"))
		}, []string{first, "10.0.0.7@10.0.1.1:1234"}},
		{"one that could not be added", func(t *testing.T, c *Client) {
			if _, err := c.Control("").AddPath(t.Context(), &controlpb.AddPathRequest{Session: "s", Path: "10.0.9.9"}); err == nil {
				t.Error("a path to nowhere is added")
			}
		}, []string{first}},
		{"the first one was replaced", func(t *testing.T, c *Client) {
			addPath(t, c, second)
			removePath(t, c, 1)
		}, []string{second}},
		{"one was removed by a control file", func(t *testing.T, c *Client) {
			addPath(t, c, "10.0.0.7@10.0.1.1")
			must(t, treeOf(t, c).write("class/rtrs-client/s/paths/ip:10.0.0.7@ip:10.0.1.1/remove_path", "1"))
		}, []string{first}},
		{"one was disconnected", func(t *testing.T, c *Client) {
			addPath(t, c, second)
			_, err := c.Control("").DisconnectPath(t.Context(), &controlpb.PathRequest{Session: "s", Id: 1})
			must(t, err)
		}, []string{first, second}},
		{"all were removed: without any it could never be served again", func(t *testing.T, c *Client) {
			addPath(t, c, second)
			removePath(t, c, 1)
			removePath(t, c, 2)
		}, []string{second}},
	} {
		t.Run(v.name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			dir := t.TempDir()
			state, options := filepath.Join(dir, "devices"), map[string]string{"dir": dir}
			withState := func(name string) func(*Config) { return func(cfg *Config) { cfg.StateFile = name } }
			c := s.newClient(withTestFront(t), withState(state))
			_, err := c.Map(t.Context(), MapRequest{Path: "vol", Session: "s", Paths: []string{first}, Mode: blk.ReadWrite, Options: options})
			must(t, err)
			v.change(t, c)
			if got := savedPathsOf(t, state); !reflect.DeepEqual(got, v.want) {
				t.Fatalf("written down are %q, want %q", got, v.want)
			}
			// A killed daemon leaves the file as it is now.
			b, err := os.ReadFile(state)
			must(t, err)
			killed := filepath.Join(dir, "killed")
			must(t, os.WriteFile(killed, b, 0o600))
			must(t, c.Unmap(t.Context(), "rnbd0", true))

			next := s.newClient(withTestFront(t), withState(killed))
			eventually(t, "the disk is served again", func() bool {
				d, err := next.Device("rnbd0")
				return err == nil && d.State() == Open
			})
			eventually(t, "all paths are connected", func() bool { return connectedPaths(t, next) == len(v.want) })
			got, want := savedPathsOf(t, killed), slices.Clone(v.want)
			slices.Sort(got) // those that connect first come first
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("the next daemon writes down %q, want %q", got, want)
			}
		})
	}
}

// A disk in use stays when the daemon is stopped, and its paths with it.
func TestPathsSurviveAStop(t *testing.T) {
	s := newTarget(t, 1<<20)
	dir := newFrontDir(t)
	must(t, os.WriteFile(dir.file("used"), nil, 0o600))
	withState := func(cfg *Config) { cfg.StateFile = dir.file("devices") }
	c := s.newClient(withTestFront(t), withState)
	_, err := c.Map(t.Context(), MapRequest{Path: "vol", Session: "s", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Options: map[string]string{"dir": string(dir)}})
	must(t, err)
	addPath(t, c, "10.0.1.1")
	must(t, c.Close(t.Context()))
	next := s.newClient(withTestFront(t), withState)
	eventually(t, "the disk is served again over both paths", func() bool {
		d, err := next.Device("rnbd0")
		return err == nil && d.State() == Open && connectedPaths(t, next) == 2
	})
}

func treeOf(t *testing.T, c *Client) *treeRig {
	return &treeRig{t: t, c: c, root: controlTree{c: c, frontend: "test"}.rootNodes()}
}

func addPath(t *testing.T, c *Client, path string) {
	t.Helper()
	_, err := c.Control("").AddPath(t.Context(), &controlpb.AddPathRequest{Session: "s", Path: path})
	must(t, err)
}

func removePath(t *testing.T, c *Client, id uint32) {
	t.Helper()
	_, err := c.Control("").RemovePath(t.Context(), &controlpb.PathRequest{Session: "s", Id: id, Force: true})
	must(t, err)
}

// The last path of a session stays, unless it is forced away.
func TestLastPathStays(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	_, err := c.Map(t.Context(), MapRequest{Path: "vol", Session: "s", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"})
	must(t, err)
	api := c.Control("")
	if _, err := api.RemovePath(t.Context(), &controlpb.PathRequest{Session: "s", Id: 1}); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("the last path: %v, want EBUSY", err)
	}
	addPath(t, c, "10.0.1.1")
	removePath(t, c, 1)
	if _, err := api.RemovePath(t.Context(), &controlpb.PathRequest{Session: "s", Id: 2}); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("the last path: %v, want EBUSY", err)
	}
	_, err = api.RemovePath(t.Context(), &controlpb.PathRequest{Session: "s", Id: 2, Force: true})
	must(t, err)
	if n := connectedPaths(t, c); n != 0 {
		t.Errorf("%d paths are left", n)
	}
}

func connectedPaths(t *testing.T, c *Client) (n int) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.sessions {
		for _, p := range s.transport.Paths() {
			if p.State == rtrs.PathConnected {
				n++
			}
		}
	}
	return n
}

// A disk of the last daemon does not wait for all of its paths, and gets the
// others when they come.
func TestPathsThatAreDownKeepNoDiskWaiting(t *testing.T) {
	for _, down := range []int{0, 1} {
		t.Run(fmt.Sprint("path ", down+1), func(t *testing.T) {
			s := newTarget(t, 1<<20)
			dir := t.TempDir()
			state := filepath.Join(dir, "devices")
			paths := []string{"10.0.0.1", "10.0.1.1"}
			saved := savedSample()
			saved.Session, saved.Paths, saved.Frontend, saved.Settings, saved.Slots = "s", paths, "test", map[string]string{"dir": dir}, 16
			saved.Location = "/dev/test-" + saved.Name
			must(t, writeState(state, &savedState{Version: stateVersion, Devices: []savedDevice{saved}}))
			s.kill()
			all := s.addrs
			s.addrs = []netip.AddrPort{all[1-down]}
			s.start()

			c := s.newClient(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
			eventually(t, "the disk is served", func() bool {
				d, err := c.Device(saved.Name)
				return err == nil && d.State() == Open
			})
			got := savedPathsOf(t, state)
			slices.Sort(got)
			if !slices.Equal(got, paths) {
				t.Errorf("the next daemon would have %q, want %q", got, paths)
			}
			eventually(t, "the other path is listed", func() bool {
				list, err := c.Control("").ListSessions(t.Context(), nil)
				return err == nil && len(list.Sessions[0].Paths) == 2 && list.Sessions[0].Paths[1].LastError != ""
			})
			folder := "class/rtrs-client/s/paths/" + verbs.TreeString(all[down].Addr())
			if src := treeOf(t, c).read(folder + "/src_addr"); strings.TrimSpace(src) != "" {
				t.Errorf("the source of a path that has none is %q", src)
			}
			_, err := s.rtrs.Listen(s.net.Device("srv"), all[down])
			must(t, err)
			eventually(t, "the other path is added", func() bool { return connectedPaths(t, c) == 2 })
			if got := savedPathsOf(t, state); len(got) != 2 {
				t.Errorf("then it would have %q", got)
			}
		})
	}
}

// A path that an earlier daemon had and that does not come ends with the
// session.
func TestMissingPathsEndWithTheSession(t *testing.T) {
	s := newTarget(t, 1<<20)
	dir := t.TempDir()
	state := filepath.Join(dir, "devices")
	saved := savedSample()
	saved.Session, saved.Paths, saved.Frontend, saved.Settings, saved.Slots = "s", []string{"10.0.9.9", "10.0.0.1"}, "test", map[string]string{"dir": dir}, 16
	must(t, writeState(state, &savedState{Version: stateVersion, Devices: []savedDevice{saved}}))
	c := s.newClient(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
	eventually(t, "the disk is served", func() bool { _, err := c.Device(saved.Name); return err == nil && s.sessions.Load() == 1 })
	began := time.Now()
	must(t, c.Unmap(t.Context(), saved.Name, true))
	if took := time.Since(began); took > forcedClose*4 {
		t.Errorf("the unmap took %v", took)
	}
	eventually(t, "the session ends", func() bool { return s.sessions.Load() == 0 })
}

// A list that was written down may name a path twice, in one spelling or in two: the
// disk is served, and the session has the path once.
func TestSavedTwins(t *testing.T) {
	for name, paths := range map[string][]string{
		"sources are given":       {"10.0.0.7@10.0.0.1", "10.0.0.7@10.0.1.1", "10.0.0.7@10.0.0.1:1234", "10.0.0.7@10.0.1.1"},
		"sources are chosen":      {"10.0.0.1", "10.0.1.1", "10.0.1.1%loopback", "10.0.0.1:1234"},
		"the first does not work": {"10.0.0.7@10.0.9.9", "10.0.0.7@10.0.0.1", "10.0.0.7@10.0.9.9", "10.0.0.7@10.0.1.1", "10.0.0.7@10.0.0.1"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newTarget(t, 1<<20)
			dir := t.TempDir()
			state := filepath.Join(dir, "devices")
			saved := savedSample()
			saved.Session, saved.Paths, saved.Frontend, saved.Settings, saved.Slots = "s", paths, "test", map[string]string{"dir": dir}, 16
			must(t, writeState(state, &savedState{Version: stateVersion, Devices: []savedDevice{saved}}))
			c := s.newClient(withTestFront(t), func(cfg *Config) { cfg.StateFile = state })
			eventually(t, "the disk is served over both paths", func() bool {
				d, err := c.Device(saved.Name)
				return err == nil && d.State() == Open && connectedPaths(t, c) == 2
			})
			want := 2
			if strings.Contains(paths[0], "10.0.9.9") {
				want = 3
			}
			eventually(t, "each path is listed once", func() bool {
				list, err := c.Control("").ListSessions(t.Context(), nil)
				return err == nil && len(list.Sessions) == 1 && len(list.Sessions[0].Paths) == want
			})
			addPathFails(t, c, paths[1])
		})
	}
}

func addPathFails(t *testing.T, c *Client, path string) {
	t.Helper()
	if _, err := c.Control("").AddPath(t.Context(), &controlpb.AddPathRequest{Session: "s", Path: path}); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("path %s again: %v, want EEXIST", path, err)
	}
}

// A path that is added again stays in the session, even if it was the last one and
// nothing answers at its address.
func TestReaddKeepsThePath(t *testing.T) {
	s := newTarget(t, 1<<20)
	c := s.newClient()
	_, err := c.Map(t.Context(), MapRequest{Path: "vol", Session: "s", Paths: []string{"10.0.0.1"}, Mode: blk.ReadWrite, Frontend: "none"})
	must(t, err)
	api := c.Control("")
	p, err := api.ReaddPath(t.Context(), &controlpb.PathRequest{Session: "s", Id: 1})
	if err != nil || p.Id == 1 || p.State != "connected" {
		t.Fatalf("while the server answers: %v, %v", p, err)
	}
	s.net.RefuseDial(s.addrs[0], syscall.ECONNREFUSED)
	if _, err = api.ReaddPath(t.Context(), &controlpb.PathRequest{Session: "s", Id: p.Id}); err == nil || !strings.Contains(err.Error(), "tried again") {
		t.Errorf("while nothing answers: %v", err)
	}
	session, err := api.ListSessions(t.Context(), &controlpb.ListRequest{})
	must(t, err)
	if paths := session.Sessions[0].Paths; len(paths) != 1 || paths[0].Id == p.Id || paths[0].State == "connected" {
		t.Errorf("paths %v", paths)
	}
	s.net.RefuseDial(s.addrs[0], nil)
	eventually(t, "the path is back", func() bool {
		l, err := api.ListSessions(t.Context(), &controlpb.ListRequest{})
		return err == nil && l.Sessions[0].Paths[0].State == "connected"
	})
	if _, err := api.ReaddPath(t.Context(), &controlpb.PathRequest{Session: "s", Id: 77}); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("a path that there is not: %v", err)
	}
}
