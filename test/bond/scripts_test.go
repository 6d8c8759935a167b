package bond

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/ctl"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
	"github.com/rnbd-go/rnbd/test/lab"
)

// folder serves a folder of the bond's control files.
func folder(tree *ctl.Tree, path string) ctltree.Node {
	return ctltree.Listing{
		Names: func() []string { return tree.List(path) },
		Node: func(name string) ctltree.Node {
			full := strings.Trim(path+"/"+name, "/")
			if f := tree.File(full); f != nil {
				return file(f)
			}
			if tree.List(full) == nil {
				return nil
			}
			return folder(tree, full)
		},
	}
}

func file(f *ctl.File) *ctltree.File {
	n := &ctltree.File{Show: f.Read}
	if f.Write != nil {
		n.Store = func(_ context.Context, data []byte) error { return f.Write(string(data)) }
	}
	return n
}

// script runs one of the scripts that come with the module.
func (n *network) script(sys, name string, args ...string) (string, error) {
	cmd := exec.Command(filepath.Join(lab.Root(), "modules/bond/scripts", name), args...)
	cmd.Env = append(os.Environ(), "SYS="+sys, "IP=ip -n "+n.name("up"), "SLAVE_IP=ip -n "+n.name("low"), "MIIMON=50", "PRIMARY=s0")
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// TestBO15_ScriptsRunOverTheFiles mounts the files as a user sees them and runs
// the scripts, with traffic through the bond that they make.
func TestBO15_ScriptsRunOverTheFiles(t *testing.T) {
	n := newNetwork(t)
	if _, err := os.Stat("/dev/fuse"); err != nil {
		t.Skipf("needs FUSE: %v", err)
	}
	root := t.TempDir()
	tree := &ctl.Tree{Net: n.net, Version: "0.1.0"}
	mounted, err := ctltree.Mount(root, map[string]ctltree.Node{"net": folder(tree, "net"), "proc/net/bonding": folder(tree, "proc/net/bonding")},
		ctltree.Options{Name: "bond", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := mounted.Close(); err != nil {
			t.Error(err)
		}
	})
	sys := filepath.Join(root, "net")
	step := func(want, script string, args ...string) {
		t.Helper()
		out, err := n.script(sys, script, args...)
		if err != nil || !strings.Contains(out, want) {
			t.Fatalf("%s %s: %v: %s; want %q", script, args, err, out, want)
		}
	}
	step("bond0 is up, s0 is active", "bond-up.sh", "bond0", "10.5.0.1/24", "s0", "s1")
	n.bond = n.net.Bond("bond0")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	udp := n.udp(ctx)
	n.allFlow([]*flow{udp}, time.Now())
	step("bond0: s0 -> s1", "bond-failover.sh", "bond0")
	n.allFlow([]*flow{udp}, time.Now())
	text, err := exec.Command("cat", filepath.Join(root, "proc/net/bonding/bond0")).Output()
	if err != nil || !strings.Contains(string(text), "Currently Active Slave: s1\n") {
		t.Errorf("proc/net/bonding/bond0: %v\n%s", err, text)
	}
	step("bond0: s1 -> s0", "bond-failover.sh", "bond0", "s0")
	n.allFlow([]*flow{udp}, time.Now())
	out, err := exec.Command("sh", "-c", fmt.Sprintf("echo +s1 | tee %s/bond0/bonding/slaves", sys)).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "Device or resource busy") {
		t.Errorf("a slave twice: %v: %s, want EBUSY as tee says it", err, out)
	}
	step("bond0 is gone", "bond-down.sh", "bond0")
	if n.net.Bond("bond0") != nil {
		t.Error("the bond is still there")
	}
}
