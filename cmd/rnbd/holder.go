package main

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// explainListen shortens the error of an address that cannot be listened on to
// the address and the reason. Where the address is taken and /proc shows the
// holder, its process is named. Other errors are returned as they are.
func explainListen(err error) error {
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "listen" || op.Addr == nil {
		return err
	}
	var reason error = op.Err
	var errno syscall.Errno
	if errors.As(err, &errno) {
		reason = errno
	}
	where := op.Net + ":" + op.Addr.String()
	if errno == syscall.EADDRINUSE {
		if pid, name := holderOf(op.Net, op.Addr.String()); pid > 0 {
			return fmt.Errorf("cannot listen on %s: process %d (%s) does: %w", where, pid, name, reason)
		}
	}
	return fmt.Errorf("cannot listen on %s: %w", where, reason)
}

// holderOf returns the process that has the port of addr open, 0 if that cannot
// be seen: sockets of other users' processes are visible to root only.
func holderOf(network, addr string) (pid int, name string) {
	ap, err := netip.ParseAddrPort(addr)
	if err != nil {
		return 0, ""
	}
	proto := strings.TrimRight(network, "46")
	for _, table := range []string{proto, proto + "6"} {
		for _, inode := range listeningInodes(filepath.Join("/proc/net", table), proto, ap.Port()) {
			if pid, name = processWith("socket:[" + inode + "]"); pid > 0 {
				return pid, name
			}
		}
	}
	return 0, ""
}

// listeningInodes are those of the sockets in a table of proc(5) that are bound
// to port; of TCP, those that listen.
func listeningInodes(table, proto string, port uint16) (inodes []string) {
	f, err := os.Open(table)
	if err != nil {
		return nil
	}
	defer f.Close()
	const local, state, inode, listen = 1, 3, 9, "0A"
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) <= inode || proto == "tcp" && fields[state] != listen {
			continue
		}
		_, hex, _ := strings.Cut(fields[local], ":")
		if n, err := strconv.ParseUint(hex, 16, 16); err == nil && uint16(n) == port {
			inodes = append(inodes, fields[inode])
		}
	}
	return inodes
}

// processWith finds a process that has a descriptor with that link.
func processWith(link string) (pid int, name string) {
	fds, _ := filepath.Glob("/proc/[0-9]*/fd/*")
	for _, fd := range fds {
		if l, err := os.Readlink(fd); err == nil && l == link {
			folder := filepath.Dir(filepath.Dir(fd))
			comm, _ := os.ReadFile(filepath.Join(folder, "comm"))
			pid, _ = strconv.Atoi(filepath.Base(folder))
			return pid, strings.TrimSpace(string(comm))
		}
	}
	return 0, ""
}
