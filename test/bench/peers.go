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
	qemuNBD      = "qemu-nbd"
	nbdServer    = "nbd-server"
	goClient     = "Go NBD client, nbdkit memory"
	nbdkitProxy  = "2 hops: nbdkit nbd, nbdkit memory"
	qemuProxy    = "2 hops: qemu-storage-daemon, nbdkit memory"
)

// addPeers starts the wanted and installed peers. A peer that does not start
// is left out, with the reason.
func (s *site) addPeers(ctx context.Context) {
	if s.wants(nbdkitMemory, goClient, nbdkitProxy, qemuProxy) && s.have(nbdkitMemory, "nbdkit", "fio") {
		s.try(nbdkitMemory, s.addNbdkit(ctx))
	}
	if s.wants(qemuNBD) && s.have(qemuNBD, "qemu-nbd", "fio") {
		s.try(qemuNBD, s.addQemu(ctx))
	}
	if s.wants(nbdServer) && s.have(nbdServer, "nbd-server", "fio") {
		s.try(nbdServer, s.addNBDServer(ctx))
	}
	s.try(iperf, s.addIperf(ctx))
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

// addNbdkit adds nbdkit's memory plugin, and all targets that reach it in other
// ways.
func (s *site) addNbdkit(ctx context.Context) error {
	mem, addr, err := s.tcp(ctx, "nbdkit-memory", func(port string) []string {
		return []string{"nbdkit", "-f", "-i", "127.0.0.1", "-p", port, "memory", fmt.Sprint(s.Size)}
	})
	if err != nil {
		return err
	}
	if err := fillExport(ctx, addr, ""); err != nil {
		return err
	}
	if s.wants(nbdkitMemory) {
		s.addFio(nbdkitMemory, nbdEngine("nbd://"+addr+"/"), mem.pid())
	}
	if s.wants(goClient) {
		_, _, err := s.addGenerator(goClient, generatorConfig{devices: []string{"nbd://" + addr + "/"}}, mem.pid())
		s.try(goClient, err)
	}
	if s.wants(nbdkitProxy) {
		s.try(nbdkitProxy, s.addNbdkitProxy(ctx, addr, mem.pid()))
	}
	if s.wants(qemuProxy) && s.have(qemuProxy, "qemu-storage-daemon") {
		s.try(qemuProxy, s.addQemuProxy(ctx, addr, mem.pid()))
	}
	return nil
}

// addNbdkitProxy adds nbdkit in front of the server at addr.
func (s *site) addNbdkitProxy(ctx context.Context, addr string, server int) error {
	proxy, socket, err := s.unix(ctx, "nbdkit-nbd", func(socket string) []string {
		return []string{"nbdkit", "-f", "-U", socket, "nbd", "uri=nbd://" + addr + "/"}
	})
	if err == nil {
		s.addFio(nbdkitProxy, nbdEngine("nbd+unix:///?socket="+socket), proxy.pid(), server)
	}
	return err
}

// addQemuProxy adds qemu-storage-daemon in front of the server at addr.
func (s *site) addQemuProxy(ctx context.Context, addr string, server int) error {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	proxy, socket, err := s.unix(ctx, "qsd", func(socket string) []string {
		return []string{"qemu-storage-daemon",
			"--blockdev", "driver=nbd,node-name=disk,server.type=inet,server.host=" + host + ",server.port=" + port,
			"--nbd-server", "addr.type=unix,addr.path=" + socket + ",max-connections=0",
			"--export", "type=nbd,id=disk,node-name=disk,name=disk,writable=on"}
	})
	if err == nil {
		s.addFio(qemuProxy, nbdEngine("nbd+unix:///disk?socket="+socket), proxy.pid(), server)
	}
	return err
}

// addQemu adds qemu-nbd on a file in memory.
func (s *site) addQemu(ctx context.Context) error {
	path, err := s.tmpfs("qemu-nbd")
	if err != nil {
		return err
	}
	p, addr, err := s.tcp(ctx, "qemu-nbd", func(port string) []string {
		return []string{"qemu-nbd", "-t", "-e", "8", "-f", "raw", "-b", "127.0.0.1", "-p", port, "-x", "", path}
	})
	if err == nil {
		s.addFio(qemuNBD, nbdEngine("nbd://"+addr+"/"), p.pid())
	}
	return err
}

// addNBDServer starts nbd-server on a file in memory. It goes to the
// background.
func (s *site) addNBDServer(ctx context.Context) error {
	path, err := s.tmpfs("nbd-server")
	if err != nil {
		return err
	}
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
		s.addFio(nbdServer, nbdEngine("nbd://127.0.0.1:"+port+"/disk"), pid)
	}
	return err
}

// daemon waits for the pid file of a daemon. The daemon ends with the site.
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
