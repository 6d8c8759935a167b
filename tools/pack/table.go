package main

// pkg is a package. Files are the paths that it takes of the folder, as patterns
// of path.Match; a folder stands for all below it.
type pkg struct {
	name, short, long string
	files             []string
	docs              bool // the documents, too
	folders           []string
	requires          []string // packages of ours, of the same version
	units             []string // services, started again when the package is upgraded
	sockets           []string
	remains           []string // removed when the package is purged
}

// packages are all of them. Every file belongs to one.
var packages = []pkg{
	{
		name: "rnbd", short: "RDMA network block devices in user space: command",
		long:  "Makes block devices and files of one host usable on another, over RDMA\nsemantics. This package has the command of both daemons, its man pages and\nits completion.",
		files: []string{"usr/bin/rnbd", "usr/share/man", "usr/share/bash-completion", "usr/share/zsh", "usr/share/fish"},
	},
	{
		name: "rnbd-plugins", short: "RDMA network block devices in user space: plugins",
		long:     "Storage plugins for block devices and files, and front ends for NBD and\nublk.",
		files:    []string{"usr/bin/io-*", "usr/bin/frontend-*"},
		requires: []string{"rnbd"},
	},
	{
		name: "rnbd-server", short: "RDMA network block devices in user space: server",
		long:     "Unit and configuration of the daemon that exports devices. It is not\nstarted before it is enabled, and is reached from this host only until\n/etc/rnbd/server.yaml says otherwise.",
		files:    []string{"usr/lib/systemd/system/rnbd-server*", "etc/rnbd/server.yaml"},
		folders:  []string{"etc/rnbd/server.d"},
		requires: []string{"rnbd", "rnbd-plugins"},
		units:    []string{"rnbd-server.service"}, sockets: []string{"rnbd-server.socket"},
		remains: []string{"/etc/rnbd/server.d", "/run/rnbd/server.sock"},
	},
	{
		name: "rnbd-client", short: "RDMA network block devices in user space: client",
		long:     "Units, udev rule and configuration of the daemon that maps devices. It is\nnot started before it is enabled.",
		files:    []string{"usr/lib/systemd/system/rnbd-client*", "usr/lib/udev/rules.d", "etc/rnbd/client.yaml"},
		folders:  []string{"etc/rnbd/client.d"},
		requires: []string{"rnbd", "rnbd-plugins"},
		units:    []string{"rnbd-client.service"}, sockets: []string{"rnbd-client.socket", "rnbd-client-nbd.socket"},
		remains: []string{"/etc/rnbd/client.d", "/run/rnbd/client.sock", "/run/rnbd/nbd.sock"},
	},
	{
		name: "rnbd-net", short: "IP over InfiniBand and bonds in user space",
		long:  "Interfaces of IP over InfiniBand over RoCEv2 in software, and their bonds.",
		files: []string{"usr/bin/rnbd-net"},
	},
	{
		name: "rnbd-sdk-doc", short: "RDMA network block devices in user space: documents",
		long: "How to run it, its protocols, and how to write plugins.",
		docs: true,
	},
}
