package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// TestE062_WhatMapSaysOfRefusals has a server refuse maps, and looks for the cause in what the
// user reads. A cause is told only where the server has told it.
func TestE062_WhatMapSaysOfRefusals(t *testing.T) {
	l := lab.New(t)
	root := l.Image("disk.img", 8<<20)
	for _, name := range []string{"taken.img", "immutable.img"} {
		if err := os.WriteFile(filepath.Join(root, name), make([]byte, 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(root, "folder"), 0o700); err != nil {
		t.Fatal(err)
	}
	immutable := exec.Command("chattr", "+i", filepath.Join(root, "immutable.img")).Run() == nil
	t.Cleanup(func() { exec.Command("chattr", "-i", filepath.Join(root, "immutable.img")).Run() })
	s := l.Server(lab.ServerOptions{SearchPath: root, Plugins: []string{"fileio"}})
	other := l.Server(lab.ServerOptions{SearchPath: root, Plugins: []string{"fileio"}})
	first, second := l.Client(lab.ClientOptions{}), l.Client(lab.ClientOptions{})
	mapped := func(c *lab.Client, args ...string) result {
		return rnbd(t, append([]string{"--socket", c.Socket, "map"}, args...)...)
	}
	mapped(first, "taken.img", "from", s.Addrs[0], "--session", "name").want(t, 0)
	for _, x := range []struct {
		name string
		skip bool
		args []string
		code int
		want []string
	}{
		{"another writer", false, []string{"taken.img", "from", s.Addrs[0]}, 6, []string{"another client has it open for writing"}},
		{"an immutable file", !immutable, []string{"immutable.img", "from", s.Addrs[0]}, 6, []string{"operation not permitted", "in plugin fileio"}},
		{"no such name", false, []string{"missing.img", "from", s.Addrs[0]}, 3, []string{"exports no such name", "rnbd discover"}},
		{"a folder", false, []string{"folder", "from", s.Addrs[0]}, 3, []string{"folder"}},
		{"a name with dots", false, []string{"../disk.img", "from", s.Addrs[0]}, 2, []string{".."}},
		{"the name of another client's session", false, []string{"disk.img", "from", s.Addrs[0], "--session", "name"}, 7, []string{"another client has the name", "--session name of its own"}},
		{"paths to two servers", false, []string{"disk.img", "from", s.Addrs[0], other.Addrs[0]}, 3, []string{"another server than the first one", "let an address move"}},
	} {
		t.Run(x.name, func(t *testing.T) {
			if x.skip {
				t.Skip("not possible on this file system")
			}
			mapped(second, x.args...).want(t, x.code, x.want...)
		})
	}
}
