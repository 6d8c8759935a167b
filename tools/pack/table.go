package main

import (
	"path"
	"slices"
	"strings"
)

// packageSpec is a package. Files are the paths that it takes of the folder, as patterns
// of path.Match, except those of but; a folder stands for all below it.
type packageSpec struct {
	name, short, long string
	section           string // of Debian; empty: admin
	files, but        []string
	docs              bool // the documents, too
	noArch            bool // the same for all architectures
	folders           []string
	requires          []string // packages of ours, of the same version
	recommends        []string // of the distribution: names that Debian and Fedora share
	suggests          []string
	units             []string // services, started again when the package is upgraded
	sockets           []string
	config            []string // folders of configuration that the administrator fills
	state             []string // left behind by the daemons: patterns of the shell
	serves            bool     // the client's disks: while one is in use the package is not removed
	overrides         []string // tags of lintian that are meant, each with its reason
	inImage           bool
}

const static = "statically-linked-binary: the programs run on any distribution, also without a dynamic linker"

// unitsInUsr: dpkg of Debian 12 follows the link /lib, and Debian 13 wants the units here.
const unitsInUsr = "systemd-service-in-odd-location: /usr/lib is where Debian 13 has units; in Debian 12 /lib is a link to it"

// netShare are man pages and completion of rnbd-net.
var netShare = []string{"usr/share/man/*/rnbd-net*", "usr/share/bash-completion/completions/rnbd-net", "usr/share/zsh/site-functions/_rnbd-net", "usr/share/fish/vendor_completions.d/rnbd-net.fish"}

// packages are all of them. Every file belongs to one.
var packages = []packageSpec{
	{
		name: "rnbd", short: "RDMA network block devices in user space: command", inImage: true,
		long:      "Makes block devices and files of one host usable on another, over RDMA\nsemantics. This package has the command of both daemons, its man pages and\nits completion, and the protocol of plugins.",
		files:     []string{"usr/bin/rnbd", "usr/share/rnbd", "usr/share/man", "usr/share/bash-completion", "usr/share/zsh", "usr/share/fish"},
		but:       netShare,
		suggests:  []string{"rnbd-server", "rnbd-client", "fuse3"},
		serves:    true,
		overrides: []string{static},
	},
	{
		name: "rnbd-plugins", short: "RDMA network block devices in user space: plugins", inImage: true,
		long:      "Storage plugins for block devices and files, and front ends for NBD and\nublk. The daemons start them.",
		files:     []string{"usr/bin/io-*", "usr/bin/frontend-*"},
		requires:  []string{"rnbd"},
		serves:    true,
		overrides: []string{static, "no-manual-page: the daemons start them, users do not"},
	},
	{
		name: "rnbd-server", short: "RDMA network block devices in user space: server", inImage: true,
		long:      "Units and configuration of the daemon that exports devices. It is not\nstarted before it is enabled, and is reached from this host only until\n/etc/rnbd/server.yaml says otherwise.",
		files:     []string{"usr/lib/systemd/system/rnbd-server*", "etc/rnbd/server.yaml"},
		folders:   []string{"etc/rnbd/server.d"},
		noArch:    true,
		requires:  []string{"rnbd", "rnbd-plugins"},
		units:     []string{"rnbd-server.service"},
		sockets:   []string{"rnbd-server.socket"},
		config:    []string{"/etc/rnbd/server.d"},
		state:     []string{"/run/rnbd/server.*", "/var/lib/rnbd"}, // the client keeps nothing in the latter
		overrides: []string{unitsInUsr},
	},
	{
		name: "rnbd-client", short: "RDMA network block devices in user space: client", inImage: true,
		long:       "Units, udev rule and configuration of the daemon that maps devices. It is\nnot started before it is enabled.",
		files:      []string{"usr/lib/systemd/system/rnbd-client*", "usr/lib/udev/rules.d", "etc/rnbd/client.yaml"},
		folders:    []string{"etc/rnbd/client.d"},
		noArch:     true,
		requires:   []string{"rnbd", "rnbd-plugins"},
		recommends: []string{"kmod"},
		units:      []string{"rnbd-client.service"},
		sockets:    []string{"rnbd-client.socket", "rnbd-client-nbd.socket"},
		config:     []string{"/etc/rnbd/client.d"},
		state:      []string{"/run/rnbd/client.*", "/run/rnbd/nbd.sock"},
		serves:     true,
		overrides:  []string{unitsInUsr},
	},
	{
		name: "rnbd-net", short: "IP over InfiniBand and bonds in user space", section: "net",
		long:      "Interfaces of IP over InfiniBand over RoCEv2 in software, and their bonds.",
		files:     append([]string{"usr/bin/rnbd-net"}, netShare...),
		overrides: []string{static},
	},
	{
		name: "rnbd-sdk-doc", short: "RDMA network block devices in user space: documents", section: "doc",
		long: "How to run it, its protocols, and how to write plugins.",
		docs: true, noArch: true,
	},
}

// commonFolders of server and client are removed with the last of them, if they
// are empty.
var commonFolders = []string{"/run/rnbd/sys", "/run/rnbd", "/etc/rnbd"}

// hasFile reports whether the package has the file.
func (p *packageSpec) hasFile(name string) bool {
	return matchesAny(p.files, name) && !matchesAny(p.but, name)
}

func matchesAny(patterns []string, name string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		ok, err := path.Match(pattern, name)
		return err == nil && ok || strings.HasPrefix(name, pattern+"/")
	})
}

// allUnits are those of the package, separated by spaces.
func (p *packageSpec) allUnits() string { return strings.Join(slices.Concat(p.units, p.sockets), " ") }

// docFolder is the folder of the package's documents.
func (p *packageSpec) docFolder() string { return "usr/share/doc/" + p.name }

// ownsFolder reports whether a folder belongs to our packages.
func (p *packageSpec) ownsFolder(dir string) bool {
	return dir == p.docFolder() || strings.HasPrefix(dir, p.docFolder()+"/") || slices.Contains(p.folders, dir) || dir == "etc/rnbd" || dir == "usr/share/rnbd"
}
