package ctl

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/bond/core"
	"github.com/rnbd-go/rnbd/modules/bond/dev"
)

// File is a control file. Errors have an errno in their chain and the words
// that the kernel logs.
type File struct {
	// Read returns the whole text; nil: the file cannot be read.
	Read func() (string, error)
	// Write executes the text of one write(2), with or without a newline at the end; nil:
	// the file cannot be written.
	Write func(text string) error
}

// Tree is the control files of the bonds of a net.
type Tree struct {
	Net *dev.Net
	// Version follows "v" in the first line of /proc/net/bonding's files.
	Version string
}

// MaxWrite is the longest text that can be written, in bytes.
const MaxWrite = core.MaxValue

// List returns the names in a folder, sorted; "" is the root. It is nil for a file and
// for a name that there is not.
func (t *Tree) List(folder string) []string {
	var prefix string
	if folder = strings.Trim(folder, "/"); folder != "" {
		prefix = folder + "/"
	}
	names := map[string]bool{}
	for path := range t.allFiles() {
		if rest, ok := strings.CutPrefix(path, prefix); ok {
			name, _, _ := strings.Cut(rest, "/")
			names[name] = true
		}
	}
	var list []string
	for n := range names {
		list = append(list, n)
	}
	slices.Sort(list)
	return list
}

// File returns the named file, nil if there is none.
func (t *Tree) File(path string) *File {
	f, ok := t.allFiles()[strings.Trim(path, "/")]
	if !ok {
		return nil
	}
	return &f
}

// allFiles are all there are at this moment.
func (t *Tree) allFiles() map[string]File {
	all := map[string]File{"net/bonding_masters": {t.bondNames, limitSize(t.Net.Masters)}}
	for _, b := range t.Net.Bonds() {
		t.bondFiles(all, b)
	}
	return all
}

// limitSize refuses a text that is longer than a page.
func limitSize(write func(string) error) func(string) error {
	return func(text string) error {
		if len(text) > MaxWrite {
			return core.Errorf(syscall.EINVAL, "a write has at most %d bytes", MaxWrite)
		}
		return write(text)
	}
}

func (t *Tree) bondNames() (string, error) {
	var names []string
	for _, b := range t.Net.Bonds() {
		names = append(names, b.Name())
	}
	return withNewline(strings.Join(names, " ")), nil
}

// withNewline ends text with a newline; an empty text stays empty, as in the kernel.
func withNewline(text string) string {
	if text == "" {
		return ""
	}
	return text + "\n"
}

func (t *Tree) bondFiles(all map[string]File, b *dev.Bond) {
	net := "net/" + b.Name() + "/"
	for _, o := range core.OptionNames() {
		f := File{Read: func() (string, error) { return withNewline(b.Show(o)), nil }}
		if core.Settable(o) {
			f.Write = limitSize(func(text string) error { return b.Set(o, text) })
		}
		all[net+"bonding/"+o] = f
	}
	all[net+"bonding/slaves"] = File{
		Read: func() (string, error) {
			var names []string
			for _, s := range b.Status().Slaves {
				names = append(names, s.Name)
			}
			return withNewline(strings.Join(names, " ")), nil
		},
		Write: limitSize(func(text string) error { return t.Net.Enslave(b, text) }),
	}
	addAttributes(all, net, b)
	for _, s := range b.Status().Slaves {
		slaveFiles(all, b, s.Name)
	}
	all["proc/net/bonding/"+b.Name()] = File{Read: func() (string, error) { return Proc(b.Status(), t.Version), nil }}
}

// addAttributes are the files of any interface.
func addAttributes(all map[string]File, net string, b *dev.Bond) {
	show := func(name string, text func(dev.Status) string) {
		all[net+name] = File{Read: func() (string, error) { return text(b.Status()) + "\n", nil }}
	}
	show("type", func(s dev.Status) string { return strconv.Itoa(int(s.Attrs.Type)) })
	show("addr_len", func(s dev.Status) string { return strconv.Itoa(len(s.Attrs.Address)) })
	show("address", func(s dev.Status) string { return dev.HW(s.Attrs.Address) })
	show("broadcast", func(s dev.Status) string { return dev.HW(s.Attrs.Broadcast) })
	show("operstate", func(s dev.Status) string {
		if s.Up && s.Carrier {
			return "up"
		}
		return "down"
	})
	show("mtu", func(s dev.Status) string { return strconv.Itoa(s.Attrs.MTU) })
	show("flags", func(s dev.Status) string { return fmt.Sprintf("0x%x", flagsOf(s)) })
	all[net+"carrier"] = File{Read: func() (string, error) {
		s := b.Status()
		switch {
		case !s.Up:
			return "", core.Errorf(syscall.EINVAL, "%s is down", s.Name)
		case s.Carrier:
			return "1\n", nil
		}
		return "0\n", nil
	}}
	write := func(name string, set func(n int) error) {
		f := all[net+name]
		f.Write = limitSize(func(text string) error {
			n, err := strconv.ParseInt(strings.TrimSpace(text), 0, 32)
			if err != nil {
				return core.Errorf(syscall.EINVAL, "%s: invalid value", name)
			}
			return set(int(n))
		})
		all[net+name] = f
	}
	write("mtu", func(n int) error {
		if n < 68 || n > 65535 {
			return core.Errorf(syscall.EINVAL, "mtu: allowed values 68 - 65535")
		}
		return b.SetMTU(n)
	})
	write("flags", func(n int) error { return b.SetUp(n&syscall.IFF_UP != 0) })
}

func flagsOf(s dev.Status) int {
	f := syscall.IFF_BROADCAST | syscall.IFF_MULTICAST | syscall.IFF_MASTER
	if s.Up {
		f |= syscall.IFF_UP
	}
	return f
}

func slaveFiles(all map[string]File, b *dev.Bond, name string) {
	show := func(file string, text func(dev.SlaveStatus) string) {
		all["net/"+name+"/bonding_slave/"+file] = File{Read: func() (string, error) {
			for _, s := range b.Status().Slaves {
				if s.Name == name {
					return text(s) + "\n", nil
				}
			}
			return "", core.Errorf(syscall.ENODEV, "%s is not enslaved any more", name)
		}}
	}
	show("state", func(s dev.SlaveStatus) string {
		if s.Active {
			return "active"
		}
		return "backup"
	})
	show("mii_status", func(s dev.SlaveStatus) string { return s.Link.String() })
	show("link_failure_count", func(s dev.SlaveStatus) string { return strconv.Itoa(int(s.Failures)) })
	show("perm_hwaddr", func(s dev.SlaveStatus) string { return dev.HW(s.PermAddress) })
}
