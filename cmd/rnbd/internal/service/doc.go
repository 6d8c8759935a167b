// Package service is a daemon's side of the service manager, systemd: sockets
// that the manager holds, the messages of readiness, and the watchdog.
//
// The protocol is that of sd_notify(3) and sd_listen_fds(3). Without a manager
// all of it does nothing.
package service
