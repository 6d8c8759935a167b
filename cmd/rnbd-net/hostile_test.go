package main

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// files returns how many file descriptors the daemon has.
func (n *node) files() int {
	n.t.Helper()
	list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.daemon.Process.Pid))
	if err != nil {
		n.t.Fatal(err)
	}
	return len(list)
}

// TestBadInput writes forbidden texts to the control files, and asks for it by
// command. Each has the kernel's errno, changes nothing and leaves nothing behind.
func TestBadInput(t *testing.T) {
	a, _ := bondNodes(t)
	for _, c := range []string{"link add x link ib0 pkey 0x8001", "link add y link ib0", "bond add bond0", "bond add bond1", "bond enslave bond0 x"} {
		if out, code := a.net(strings.Fields(c)...); code != 0 {
			t.Fatalf("%s: %d: %s", c, code, out)
		}
	}
	run(t, "ip", "-n", a.ns, "link", "set", "y", "up")
	state := func() string {
		links, _ := a.net("link", "show")
		bonds, _ := a.net("bond", "show")
		var names []string
		for _, l := range strings.Split(links, "\n") {
			if f := strings.Fields(l); len(f) > 3 {
				names = append(names, strings.Join(f[:3], " "))
			}
		}
		return strings.Join(names, "\n") + "\n" + bonds
	}
	before, files := state(), a.files()
	for _, c := range []struct {
		file, text string
		want       error
	}{
		{"net/ib0/create_child", "0", syscall.EINVAL},
		{"net/ib0/create_child", "0x8000", syscall.EINVAL},
		{"net/ib0/create_child", "65536", syscall.EINVAL},
		{"net/ib0/create_child", "0xffff", syscall.ENOTUNIQ}, // the parent's
		{"net/ib0/create_child", "0x7fff", syscall.ENOTUNIQ},
		{"net/ib0/delete_child", "0", syscall.EINVAL},
		{"net/ib0/delete_child", "0x8001", syscall.ENODEV}, // made by name
		{"net/bonding_masters", "+0123456789abcdef", syscall.EPERM},
		{"net/bonding_masters", "+ib0", syscall.EEXIST},
		{"net/bonding_masters", "+bond0", syscall.EEXIST},
		{"net/bonding_masters", "-bond7", syscall.ENODEV},
		{"net/bond0/bonding/slaves", "+0123456789abcdef", syscall.EPERM},
		{"net/bond0/bonding/slaves", "+y", syscall.EPERM}, // it is up
		{"net/bond0/bonding/slaves", "+bond1", syscall.EPERM},
		{"net/bond0/bonding/slaves", "+bond0", syscall.EPERM},
		{"net/bond0/bonding/slaves", "+x", syscall.EBUSY},
		{"net/bond1/bonding/slaves", "+x", syscall.EBUSY},
		{"net/bond0/bonding/slaves", "+ib9", syscall.ENODEV},
		{"net/bond0/bonding/slaves", "-ib1", syscall.EINVAL},
		{"net/bond0/bonding/mode", "balance-rr", syscall.ENOTEMPTY},
		{"net/bond1/bonding/mode", "802.3ad", syscall.EOPNOTSUPP},
		{"net/bond0/bonding/miimon", "-1", syscall.EINVAL},
		{"net/bond0/bonding/arp_ip_target", "+here", syscall.EINVAL},
		{"net/bond0/bonding/active_slave", "ib1", syscall.EINVAL},
	} {
		if err := a.write("class/"+c.file, c.text+"\n"); !errors.Is(err, c.want) {
			t.Errorf("%q to %s: %v, want %v", c.text, c.file, err, c.want)
		}
	}
	for _, c := range []struct {
		line string
		code int
	}{
		{"link add abcdefghijklmnop link ib0", 2}, // 16 characters
		{"link add abcdefghijklmno link ib0", 0},
		{"link del abcdefghijklmno", 0},
		{"link add a/b link ib0", 2},
		{"link add a%d link ib0", 2},
		{"link add .. link ib0", 2},
		{"link add z link ib0 pkey 0", 2},
		{"link add z link ib0 pkey 0x8000", 2},
		{"link add z link x", 2}, // a child of a child
		{"link add x link ib0", 5},
		{"link add bond0 link ib0", 5},
		{"bond add ib0", 4},
		{"bond enslave bond0 abcdefghijklmnop", 6},
		{"bond enslave bond0 y", 6},
		{"bond enslave bond0 bond1", 6},
	} {
		if out, code := a.net(strings.Fields(c.line)...); code != c.code {
			t.Errorf("%s: exit code %d, want %d: %s", c.line, code, c.code, out)
		}
	}
	a.longWrites()
	a.badRequests()
	if after := state(); after != before {
		t.Errorf("bad input has changed\n%s\nto\n%s", before, after)
	}
	eventually(t, "no file descriptor is left", func() bool { return a.files() <= files })
}

// longWrites writes 1 MiB to each control file. Links lead to files of the kernel.
func (n *node) longWrites() {
	n.t.Helper()
	written := 0
	err := filepath.WalkDir(n.tree, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || d.Type()&fs.ModeSymlink != 0 {
			return err
		}
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if errors.Is(err, fs.ErrPermission) {
			return nil // not one to be written
		}
		if err != nil {
			return err
		}
		defer f.Close()
		for _, b := range []string{"1", "+", "\n", "\x00"} {
			if _, err := f.Write([]byte(strings.Repeat(b, 1<<20))); !errors.Is(err, syscall.EINVAL) {
				n.t.Errorf("1 MiB of %q to %s: %v, want EINVAL", b, path, err)
			}
		}
		written++
		return nil
	})
	if err != nil || written < 20 {
		n.t.Errorf("%d files were written to: %v", written, err)
	}
}

// badRequests sends texts to the control socket that are no requests.
func (n *node) badRequests() {
	n.t.Helper()
	for _, text := range []string{
		"\x00\x01\x02\r\n\r\n",
		"POST /links HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
		"POST /links HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1048576\r\n\r\n{\"name\":\"" + strings.Repeat("x", 1<<20-9),
		"PATCH /registry HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
		"GET /routes?address=here HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
		"POST /bonds HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 30\r\n\r\n{\"file\":\"../../etc\",\"text\":\"\"} ",
	} {
		c, err := net.Dial("unix", n.socket)
		if err != nil {
			n.t.Fatal(err)
		}
		go c.Write([]byte(text))
		r, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil && r.StatusCode < 400 {
			n.t.Errorf("%.60q: answered %s", text, r.Status)
		}
		c.Close()
	}
}
