package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Names of the peers. Those on two hops reach nbdkit's memory plugin through a
// proxy, as our front end reaches our server.
const (
	nbdkitMemory = "nbdkit memory"
	nbdkitFile   = "nbdkit file"
	qemuNBD      = "qemu-nbd"
	nbdServer    = "nbd-server"
	goClient     = "Go NBD client, nbdkit memory"
	nbdkitProxy  = "2 hops: nbdkit nbd, nbdkit memory"
	qemuProxy    = "2 hops: qemu-storage-daemon, nbdkit memory"
)

// addPeers starts what is installed. A peer that does not start is left out,
// with the reason.
func (s *site) addPeers(ctx context.Context) {
	if s.have(nbdkitMemory, "nbdkit") {
		s.try(nbdkitMemory, s.addNbdkitMemory(ctx))
		s.try(nbdkitFile, s.addNbdkitFiles(ctx))
	}
	if s.have(qemuNBD, "qemu-nbd") {
		s.try(qemuNBD, s.addQemu(ctx))
	}
	if s.have(nbdServer, "nbd-server") {
		s.try(nbdServer, s.addNBDServer(ctx))
	}
}

func (s *site) try(what string, err error) {
	if err != nil {
		s.skip(what, err)
	}
}

// tcp starts a server that argv makes for a port, and returns where it
// listens.
func (s *site) tcp(ctx context.Context, name string, argv func(port string) []string) (*peer, string, error) {
	port, err := freePort()
	if err != nil {
		return nil, "", err
	}
	p, err := start(s.dir, name, argv(port)...)
	if err != nil {
		return nil, "", err
	}
	s.stops = append(s.stops, p.stop)
	addr := net.JoinHostPort("127.0.0.1", port)
	return p, addr, p.await(ctx, "tcp", addr)
}

// unix is tcp for a unix socket.
func (s *site) unix(ctx context.Context, name string, argv func(socket string) []string) (*peer, string, error) {
	socket := filepath.Join(s.dir, name+".sock")
	p, err := start(s.dir, name, argv(socket)...)
	if err != nil {
		return nil, "", err
	}
	s.stops = append(s.stops, p.stop)
	return p, socket, p.await(ctx, "unix", socket)
}

func (s *site) addNbdkitMemory(ctx context.Context) error {
	mem, addr, err := s.tcp(ctx, "nbdkit-memory", func(port string) []string {
		return []string{"nbdkit", "-f", "-i", "127.0.0.1", "-p", port, "memory", fmt.Sprint(s.size)}
	})
	if err != nil {
		return err
	}
	if err := fillExport(ctx, addr, ""); err != nil {
		return err
	}
	s.addFio(classRAM, nbdkitMemory, "nbd://"+addr+"/", mem.pid())
	if err := s.addWorker(classRAM, goClient, workerConfig{kind: "nbd", addr: addr}, mem.pid()); err != nil {
		return err
	}
	proxy, socket, err := s.unix(ctx, "nbdkit-nbd", func(socket string) []string {
		return []string{"nbdkit", "-f", "-U", socket, "nbd", "uri=nbd://" + addr + "/"}
	})
	if err != nil {
		return err
	}
	s.addFio(classRAM, nbdkitProxy, "nbd+unix:///?socket="+socket, proxy.pid(), mem.pid())
	if !s.have(qemuProxy, "qemu-storage-daemon") {
		return nil
	}
	host, port, _ := net.SplitHostPort(addr)
	proxy, socket, err = s.unix(ctx, "qsd", func(socket string) []string {
		return []string{"qemu-storage-daemon",
			"--blockdev", "driver=nbd,node-name=disk,server.type=inet,server.host=" + host + ",server.port=" + port,
			"--nbd-server", "addr.type=unix,addr.path=" + socket + ",max-connections=0",
			"--export", "type=nbd,id=disk,node-name=disk,name=disk,writable=on"}
	})
	if err != nil {
		return err
	}
	s.addFio(classRAM, qemuProxy, "nbd+unix:///disk?socket="+socket, proxy.pid(), mem.pid())
	return nil
}

// addNbdkitFiles adds nbdkit's file plugin on a file in memory and on one on
// the disk.
func (s *site) addNbdkitFiles(ctx context.Context) error {
	return s.onFiles("nbdkit-file", func(class, path string) error {
		p, addr, err := s.tcp(ctx, "nbdkit-file", func(port string) []string {
			return []string{"nbdkit", "-f", "-i", "127.0.0.1", "-p", port, "file", path}
		})
		if err == nil {
			s.addFio(class, nbdkitFile, "nbd://"+addr+"/", p.pid())
		}
		return err
	})
}

// onFiles calls add for a file in memory and for one on the disk.
func (s *site) onFiles(name string, add func(class, path string) error) error {
	path, err := s.tmpfs(name)
	if err != nil {
		return err
	}
	if err := add(classRAM, path); err != nil {
		return err
	}
	if path, err = s.disk(name + "-cached"); err != nil {
		return err
	}
	return add(classCached, path)
}

func (s *site) addQemu(ctx context.Context) error {
	serve := func(class, path string, options ...string) error {
		p, addr, err := s.tcp(ctx, "qemu-nbd", func(port string) []string {
			return append([]string{"qemu-nbd", "-t", "-e", "4", "-f", "raw", "-b", "127.0.0.1", "-p", port, "-x", ""}, append(options, path)...)
		})
		if err == nil {
			s.addFio(class, qemuNBD, "nbd://"+addr+"/", p.pid())
		}
		return err
	}
	if err := s.onFiles("qemu-nbd", func(class, path string) error { return serve(class, path) }); err != nil {
		return err
	}
	path, err := s.disk("qemu-nbd-direct")
	if err != nil {
		return err
	}
	return serve(classDirect, path, "--cache=none", "--aio=native")
}

// addNBDServer starts nbd-server, which goes to the background.
func (s *site) addNBDServer(ctx context.Context) error {
	return s.onFiles("nbd-server", func(class, path string) error {
		conf, pidFile := path+".conf", path+".pid"
		port, err := freePort()
		if err != nil {
			return err
		}
		text := fmt.Sprintf("[generic]\nlistenaddr = 127.0.0.1\nport = %s\n[disk]\nexportname = %s\n", port, path)
		if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
			return err
		}
		out, err := exec.CommandContext(ctx, "nbd-server", "-C", conf, "-p", pidFile).CombinedOutput()
		if err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		pid, err := s.daemon(ctx, pidFile)
		if err == nil {
			s.addFio(class, nbdServer, "nbd://127.0.0.1:"+port+"/disk", pid)
		}
		return err
	})
}

// daemon waits for the file with the process of a daemon, which ends with the
// site.
func (s *site) daemon(ctx context.Context, pidFile string) (pid int, err error) {
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end) && ctx.Err() == nil; {
		b, _ := os.ReadFile(pidFile)
		if pid, err = strconv.Atoi(strings.TrimSpace(string(b))); err == nil && pid > 1 {
			s.stops = append(s.stops, func() { syscall.Kill(-pid, syscall.SIGKILL) })
			return pid, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	return 0, fmt.Errorf("%s does not appear", pidFile)
}
