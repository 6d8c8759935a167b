package ctl

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/bond/dev"
)

var update = flag.Bool("update", false, "write the golden texts")

// stub is a slave of InfiniBand or Ethernet without a link below.
type stub struct {
	name    string
	attrs   dev.Attrs
	up      bool
	carrier atomic.Bool
	speed   int
	calls   dev.Callbacks
}

func newStub(name string, linkType uint16, last byte) *stub {
	n := map[uint16]int{1: 6, 32: 20}[linkType]
	s := &stub{name: name, speed: 10000, attrs: dev.Attrs{Type: linkType, Address: make([]byte, n), Broadcast: make([]byte, n), MTU: 2044}}
	s.carrier.Store(true)
	s.attrs.Address[n-1] = last
	return s
}

func (s *stub) Name() string                 { return s.name }
func (s *stub) Attrs() dev.Attrs             { return s.attrs }
func (s *stub) Speed() (int, bool)           { return s.speed, true }
func (s *stub) IsUp() bool                   { return s.up }
func (s *stub) SetUp(up bool) error          { s.up = up; return nil }
func (s *stub) Carrier() bool                { return s.carrier.Load() }
func (s *stub) SetsAddress() bool            { return len(s.attrs.Address) == 6 }
func (s *stub) SetAddress(a []byte) error    { s.attrs.Address = a; return nil }
func (s *stub) SetMTU(n int) error           { s.attrs.MTU = n; return nil }
func (s *stub) JoinGroup(netip.Addr) error   { return nil }
func (s *stub) LeaveGroup(netip.Addr) error  { return nil }
func (s *stub) SetFilter(dev.RxFilter) error { return nil }
func (s *stub) Attach(c dev.Callbacks)       { s.calls = c }
func (s *stub) Detach()                      { s.calls = dev.Callbacks{} }
func (s *stub) Send([]byte) error            { return nil }

func newTree(t testing.TB, slaves ...*stub) *Tree {
	n := &dev.Net{Log: slog.New(slog.DiscardHandler)}
	t.Cleanup(n.Close)
	for _, s := range slaves {
		if err := n.AddDevice(s); err != nil {
			t.Fatal(err)
		}
	}
	return &Tree{Net: n, Version: "0.1.0"}
}

// run writes "path text" lines.
func run(t testing.TB, tree *Tree, lines ...string) {
	t.Helper()
	for _, l := range lines {
		path, text, _ := strings.Cut(l, " ")
		f := tree.File(path)
		if f == nil || f.Write == nil {
			t.Fatalf("%s cannot be written", path)
		}
		if err := f.Write(text + "\n"); err != nil {
			t.Fatalf("%s: %v", l, err)
		}
	}
}

func read(t testing.TB, tree *Tree, path string) string {
	t.Helper()
	f := tree.File(path)
	if f == nil || f.Read == nil {
		t.Fatalf("%s cannot be read", path)
	}
	text, err := f.Read()
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	return text
}

// TestGolden compares everything that can be read with testdata, in the states
// that a bond goes through.
func TestGolden(t *testing.T) {
	for _, c := range []struct {
		name  string
		lines []string
		then  func(a, b *stub)
	}{
		{"empty", []string{"net/bonding_masters +bond0"}, nil},
		{"infiniband-mii", []string{
			"net/bonding_masters +bond0",
			"net/bond0/bonding/mode active-backup",
			"net/bond0/bonding/miimon 100",
			"net/bond0/bonding/downdelay 200",
			"net/bond0/bonding/primary ib0",
			"net/bond0/flags 0x1",
			"net/bond0/bonding/slaves +ib0",
			"net/bond0/bonding/slaves +ib1",
		}, nil},
		{"carrier-lost", []string{
			"net/bonding_masters +bond0",
			"net/bond0/bonding/miimon 100",
			"net/bond0/bonding/downdelay 200",
			"net/bond0/flags 0x1",
			"net/bond0/bonding/slaves +ib0",
			"net/bond0/bonding/slaves +ib1",
		}, func(a, _ *stub) { a.carrier.Store(false); a.calls.Changed() }},
		{"arp", []string{
			"net/bonding_masters +bond0",
			"net/bond0/bonding/arp_interval 250",
			"net/bond0/bonding/arp_ip_target +10.0.0.1",
			"net/bond0/bonding/arp_ip_target +10.0.0.2",
			"net/bond0/bonding/arp_validate all",
			"net/bond0/bonding/fail_over_mac follow",
			"net/bond0/bonding/slaves +eth0",
		}, func(_, _ *stub) {}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, b, e := newStub("ib0", 32, 1), newStub("ib1", 32, 2), newStub("eth0", 1, 3)
				b.speed = 0
				tree := newTree(t, a, b, e)
				run(t, tree, c.lines...)
				time.Sleep(time.Second)
				if c.then != nil {
					c.then(a, b)
					synctest.Wait()
				}
				golden(t, c.name, dump(t, tree, ""))
			})
		})
	}
}

// dump is every file below folder, with its text.
func dump(t testing.TB, tree *Tree, folder string) string {
	var w strings.Builder
	for _, name := range tree.List(folder) {
		path := strings.Trim(folder+"/"+name, "/")
		f := tree.File(path)
		if f == nil {
			w.WriteString(dump(t, tree, path))
			continue
		}
		if name == "address" && len(text(f)) == 18 && text(f)[:2] != "00" { // of a bond without slaves
			fmt.Fprintf(&w, "== %s\nrandom\n", path)
			continue
		}
		fmt.Fprintf(&w, "== %s\n%s", path, text(f))
	}
	return w.String()
}

// text is the text of a file, or its error.
func text(f *File) string {
	s, err := f.Read()
	if err != nil {
		return fmt.Sprintf("error: %v (%v)\n", err, errors.Unwrap(err))
	}
	return s
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".txt")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the files are\n%s\nwant %s:\n%s", got, file, want)
	}
}

func TestRefusals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tree := newTree(t, newStub("ib0", 32, 1), newStub("eth0", 1, 2))
		run(t, tree, "net/bonding_masters +bond0", "net/bond0/bonding/slaves +ib0")
		for _, c := range []struct {
			path, text string
			errno      syscall.Errno
		}{
			{"net/bond0/bonding/slaves", "+eth0", syscall.EINVAL},
			{"net/bond0/bonding/slaves", strings.Repeat("+", 1<<20), syscall.EINVAL},
			{"net/bonding_masters", strings.Repeat("x", 1<<20), syscall.EINVAL},
			{"net/bonding_masters", "+0123456789abcdef", syscall.EPERM},
			{"net/bond0/bonding/miimon", strings.Repeat("9", 1<<20), syscall.EINVAL},
			{"net/bond0/mtu", "67", syscall.EINVAL},
			{"net/bond0/mtu", "99999999999999", syscall.EINVAL},
			{"net/bond0/flags", "up", syscall.EINVAL},
			{"net/bond0/bonding/mode", "broadcast", syscall.ENOTEMPTY},
		} {
			before := dump(t, tree, "")
			if err := tree.File(c.path).Write(c.text); !errors.Is(err, c.errno) {
				t.Errorf("%s %.20s: %v, want %v", c.path, c.text, err, c.errno)
			}
			if after := dump(t, tree, ""); after != before {
				t.Errorf("%s %.20s: a refused write changed\n%s\nto\n%s", c.path, c.text, before, after)
			}
		}
		for path, f := range map[string]*File{"net/bond0/bonding/mii_status": tree.File("net/bond0/bonding/mii_status"), "net/bond0/type": tree.File("net/bond0/type")} {
			if f.Write != nil {
				t.Errorf("%s can be written", path)
			}
		}
		if tree.File("net/bond1/type") != nil || tree.File("net") != nil || tree.List("net/none") != nil {
			t.Error("there are files and folders that should not be")
		}
	})
}

func TestFilesFollowSlaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tree := newTree(t, newStub("ib0", 32, 1))
		run(t, tree, "net/bonding_masters +bond0", "net/bond0/bonding/slaves +ib0")
		f := tree.File("net/ib0/bonding_slave/state")
		if text, err := f.Read(); err != nil || text != "active\n" {
			t.Errorf("state %q, %v", text, err)
		}
		run(t, tree, "net/bond0/bonding/slaves -ib0")
		if _, err := f.Read(); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("an open file of a released slave: %v, want ENODEV", err)
		}
		if slices.Contains(tree.List("net"), "ib0") {
			t.Error("the released slave still has files")
		}
		run(t, tree, "net/bonding_masters -bond0")
		if got := read(t, tree, "net/bonding_masters"); got != "" {
			t.Errorf("bonding_masters is %q without bonds", got)
		}
	})
}

// FuzzWrite writes to any file of a tree: the answer is nil or has an errno, and the
// tree can still be read.
func FuzzWrite(f *testing.F) {
	f.Add("net/bonding_masters", "+bond1")
	f.Add("net/bond0/bonding/slaves", "-ib0")
	f.Add("net/bond0/bonding/arp_ip_target", "+1.2.3.4")
	f.Add("net/bond0/flags", "0x1")
	f.Fuzz(func(t *testing.T, path, text string) {
		tree := newTree(t, newStub("ib0", 32, 1))
		run(t, tree, "net/bonding_masters +bond0", "net/bond0/bonding/slaves +ib0")
		file := tree.File(path)
		if file == nil || file.Write == nil {
			return
		}
		if err := file.Write(text); err != nil {
			var errno syscall.Errno
			if !errors.As(err, &errno) {
				t.Fatalf("%s %q: %v has no errno", path, text, err)
			}
		}
		for _, name := range tree.List("net") {
			if name != "bonding_masters" && (name == "" || len(name) > 15 || strings.ContainsAny(name, "/ \n")) {
				t.Fatalf("%s %q made an interface %q", path, text, name)
			}
		}
	})
}
