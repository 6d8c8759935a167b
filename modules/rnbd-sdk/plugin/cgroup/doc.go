// Package cgroup gives the processes that a daemon starts control groups of their
// own.
//
// It works where another process, usually systemd by Delegate=yes, has left the
// daemon's group of version 2 to it, and nowhere else: a group without the mark of a
// delegation is not touched. The daemon moves into a group below its own, for
// a group that has groups below it must have no processes where controllers are
// passed on (Documentation/admin-guide/cgroup-v2.rst of Linux, "No Internal Process
// Constraint").
//
//	rnbd-server.service
//	├── daemon           the daemon
//	├── io-blockio-1     a plugin
//	└── io-fileio-2
package cgroup
