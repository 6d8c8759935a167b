package confine

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/cgroup"
)

// Config is the choice of a daemon's user for its plugins. The zero value confines
// nothing.
type Config struct {
	Mode     Mode
	Launcher []string // the program that calls Exec, with its arguments
	User     string   // empty: the daemon's own
	// Allow has more rights of plugins, by their names: network, programs, disks, none or an
	// absolute path. none takes the rights away that a known name has.
	Allow map[string][]string
	// Groups is the delegated control group of the daemon; nil: there is none.
	Groups *cgroup.Tree
}

// Words of Config.Allow, besides paths.
const (
	AllowNetwork  = "network"
	AllowPrograms = "programs"
	AllowDisks    = "disks"
	AllowNone     = "none"
)

// Check reports an error in c.
func (c *Config) Check() error {
	for name, all := range c.Allow {
		for _, a := range all {
			if !slices.Contains([]string{AllowNetwork, AllowPrograms, AllowDisks, AllowNone}, a) && (!filepath.IsAbs(a) || a == "/") {
				return fmt.Errorf("plugin %s may use %q: write %s, %s, %s, %s or an absolute path", name, a, AllowNetwork, AllowPrograms, AllowDisks, AllowNone)
			}
		}
	}
	if c.confines() && len(c.Launcher) == 0 {
		return fmt.Errorf("confinement %q needs a launcher", c.Mode)
	}
	if c.User == "" {
		return nil
	}
	if !c.confines() {
		return fmt.Errorf("plugins run as user %s only with confinement %s or %s", c.User, Try, Strict)
	}
	_, err := LookUp(c.User)
	return err
}

func (c *Config) confines() bool { return c.Mode != "" && c.Mode != Off }

// Storage returns the Profile of a storage plugin that serves the files below root;
// nil if nothing is confined. later lets the folder appear after the start: then the
// nearest folder above it that is there is allowed.
func (c *Config) Storage(name, root string, later bool) (*Profile, error) {
	if !c.confines() {
		return nil, nil
	}
	p := &Profile{URing: true, Caps: []int{unix.CAP_DAC_OVERRIDE, unix.CAP_IPC_LOCK, unix.CAP_SYS_NICE}}
	switch {
	case root == "":
		p.Files = append(p.Files, Rule{Path: "/dev", Access: Write})
	case later:
		p.Files = append(p.Files, Rule{Path: above(root), Access: Write, Required: true})
	default:
		p.Files = append(p.Files, Rule{Path: root, Access: Write, Required: true})
	}
	return p, c.complete(name, p)
}

// above returns the folder above path, or the nearest above it that exists.
func above(path string) string {
	for {
		path = filepath.Dir(path)
		if unix.Access(path, unix.F_OK) == nil || path == "/" || path == "." {
			return path
		}
	}
}

// Frontend is the Profile of a front end; nil if nothing is confined. Those named in disks show block devices
// of this host.
func (c *Config) Frontend(name string, disks bool) (*Profile, error) {
	if !c.confines() {
		return nil, nil
	}
	p := &Profile{Disks: disks, Caps: []int{unix.CAP_IPC_LOCK, unix.CAP_NET_ADMIN}}
	return p, c.complete(name, p)
}

// The files with which names of hosts become addresses, and certificates are checked.
var resolverFiles = []string{"/etc/hosts", "/etc/resolv.conf", "/etc/nsswitch.conf", "/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust"}

// The programs of a distribution, and the files that most of them read.
var (
	programFolders = []string{"/usr", "/bin", "/sbin", "/lib", "/lib64"}
	programFiles   = []string{"/etc/ld.so.cache", "/etc/passwd", "/etc/group", "/etc/nsswitch.conf", "/etc/gnutls", "/etc/crypto-policies", "/etc/ssl/openssl.cnf"}
)

// complete adds the rights of every profile, and those of Allow.
func (c *Config) complete(name string, p *Profile) error {
	p.Strict, p.Groups = c.Mode == Strict, c.Groups
	if c.User != "" {
		u, err := LookUp(c.User)
		if err != nil {
			return err
		}
		p.User = u
		if p.User.UID != 0 { // the point of it is that the user's rights to files count
			p.Caps = []int{unix.CAP_IPC_LOCK}
		}
	}
	for _, a := range c.Allow[name] {
		switch a {
		case AllowNone:
			p.Disks = false
		case AllowDisks:
			p.Disks = true
		case AllowNetwork:
			p.Network = true
			p.Files = append(p.Files, rulesOf(Read, resolverFiles...)...)
		case AllowPrograms:
			p.Programs = true
			p.Files = append(p.Files, rulesOf(Run, programFolders...)...)
			p.Files = append(p.Files, rulesOf(Read, programFiles...)...)
		default:
			p.Files = append(p.Files, Rule{Path: a, Access: Write, Required: true})
		}
	}
	p.URing = p.URing || p.Disks || p.Network
	if p.Network { // with it the process could set up the host's network
		p.Caps = slices.DeleteFunc(p.Caps, func(c int) bool { return c == unix.CAP_NET_ADMIN })
	}
	if p.Disks {
		p.Caps = []int{unix.CAP_DAC_OVERRIDE, unix.CAP_DAC_READ_SEARCH, unix.CAP_IPC_LOCK, unix.CAP_NET_ADMIN,
			unix.CAP_SYS_ADMIN, unix.CAP_SYS_NICE, unix.CAP_SYS_PTRACE, unix.CAP_SYS_RESOURCE}
	}
	return nil
}

// ParseAllow reads NAME=WHAT, repeated.
func ParseAllow(in []string) (map[string][]string, error) {
	out := map[string][]string{}
	for _, s := range in {
		name, what, ok := strings.Cut(s, "=")
		if !ok || name == "" || what == "" {
			return nil, fmt.Errorf("%q: write NAME=WHAT, where WHAT is network, programs, disks, none or an absolute path", s)
		}
		out[name] = append(out[name], what)
	}
	return out, nil
}
