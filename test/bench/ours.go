package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// Names of our targets: through the NBD front end, with the client library in the
// application's process, and a storage plugin without server and network.
const (
	frontEnd    = "rnbd, NBD front end"
	fuseFile    = "rnbd, FUSE file"
	fuseLoop    = "rnbd, fuse-loop"
	direct      = "rnbd, client library"
	crcOff      = ", CRC off"
	overRoCE    = "rnbd, client library over rocev2"
	keysChange  = "rnbd, client library, always-invalidate"
	keysStay    = "rnbd, client library, no always-invalidate"
	ioFileio    = "rnbd, io-fileio"
	ioBlockio   = "rnbd, io-blockio"
	ringFileio  = "rnbd, io-fileio alone"
	ringBlockio = "rnbd, io-blockio alone"
	idleFleet   = "rnbd, idle"
)

// paths names the library over n paths of limited rate.
func paths(n int) string { return fmt.Sprintf("rnbd, client library, %d limited paths", n) }

// hasCRCOff reports whether a target is measured without checksums too.
func hasCRCOff(name string) bool { return name == frontEnd || name == direct }

// addNetwork starts the servers of memory over the network, ours and others.
// Each target has a server of its own.
func (s *site) addNetwork(ctx context.Context) error {
	for _, crc := range []bool{true, false} {
		suffix := map[bool]string{false: crcOff}[crc]
		if err := s.addLibrary(direct+suffix, crc); err != nil {
			return err
		}
		if err := s.addFrontEnd(ctx, frontEnd+suffix, crc); err != nil {
			return err
		}
	}
	if err := s.addRoCE(); err != nil {
		return err
	}
	s.try(fuseFile, s.addFuse(fuseFile, "fuse"))
	s.try(fuseLoop, s.addFuse(fuseLoop, "fuse-loop"))
	s.addPeers(ctx)
	s.try(floorSocket, s.addFloor(ctx))
	s.addBusy()
	return nil
}

// memoryServer starts a server with devices ram* in memory, size bytes each.
func (s *site) memoryServer(size int64, o lab.ServerOptions, flags ...string) (*lab.Server, error) {
	o.SearchPath, o.Plugins, o.Env = s.dir, []string{"memory"}, []string{lab.MetricsEnv(s.metrics())}
	o.Extra = append([]string{"--io-mode", "ram*=memory", "--io-config", "memory:size=" + strconv.FormatInt(size, 10),
		"--log-level", "warn"}, flags...)
	return s.lab.StartServer(o)
}

// crcFlag is that of both daemons.
func crcFlag(on bool) string { return fmt.Sprintf("--mpa-crc=%t", on) }

func (s *site) addLibrary(name string, crc bool) error {
	if !s.wants(name) {
		return nil
	}
	server, err := s.memoryServer(s.Size, lab.ServerOptions{}, crcFlag(crc))
	if err != nil {
		return err
	}
	_, _, err = s.addOurs(name, library(server.Addrs, crc, "ram"), s.Size, server.PID())
	return err
}

func (s *site) addFrontEnd(ctx context.Context, name string, crc bool) error {
	if !s.wants(name) || !s.have(name, "fio") {
		return nil
	}
	server, err := s.memoryServer(s.Size, lab.ServerOptions{}, crcFlag(crc))
	if err != nil {
		return err
	}
	client, err := s.lab.StartClient(lab.ClientOptions{
		Extra: []string{"--log-level", "warn", crcFlag(crc)}, Env: []string{lab.MetricsEnv(s.metrics())}})
	if err != nil {
		return err
	}
	d, err := client.Map("ram", server)
	if err != nil {
		return fmt.Errorf("%s: map: %w", name, err)
	}
	if err := fillExport(ctx, client.NBD, d.Name); err != nil {
		return fmt.Errorf("%s: fill: %w", name, err)
	}
	t := s.addFio(name, nbdEngine(client.URI(d.Name)), server.PID(), client.PID())
	t.verify = s.fioVerify(nbdEngine(client.URI(d.Name)))
	return nil
}

// addFuse adds fio on a file of the front end fuse, or on the loop device on one.
func (s *site) addFuse(name, frontend string) error {
	if !s.wants(name) || !s.have(name, "fio") {
		return nil
	}
	server, err := s.memoryServer(s.Size, lab.ServerOptions{})
	if err != nil {
		return err
	}
	client, err := s.lab.StartClient(lab.ClientOptions{
		Extra: []string{"--log-level", "warn", "--fuse-dir", filepath.Join(s.lab.Dir, frontend)}, Env: []string{lab.MetricsEnv(s.metrics())}})
	if err != nil {
		return err
	}
	d, err := client.Map("ram", server, func(r *controlpb.MapRequest) { r.Frontend = frontend })
	if err != nil {
		return fmt.Errorf("map: %w", err)
	}
	s.stops = append(s.stops, func() { _ = client.Unmap(d.Name, true) }) // a killed daemon would leave the loop device
	if err := fillOpen(d.Endpoint, s.Size); err != nil {
		return err
	}
	engine := []string{"--ioengine=libaio", "--direct=1", "--filename=" + d.Endpoint}
	t := s.addFio(name, engine, server.PID(), client.PID())
	t.verify = s.fioVerify(engine)
	return nil
}

// The two ends of rocev2: loopback addresses. Loopback takes packets of 4 KiB
// and more, so the path MTU is RoCE's largest.
var roceServer, roceClient = lab.LoopbackAddr(1), lab.LoopbackAddr(2)

// addRoCE adds a server that the library reaches over rocev2.
func (s *site) addRoCE() error {
	if !s.wants(overRoCE) {
		return nil
	}
	server, err := s.memoryServer(s.Size, lab.ServerOptions{}, "--listen", "rocev2://"+roceServer+":1234")
	if err != nil {
		return err
	}
	_, _, err = s.addOurs(overRoCE, library([]string{roceClient + "@" + roceServer + ":1234%rocev2"}, true, "ram"), s.Size, server.PID())
	return err
}

// keyDeviceSize is the size of each of the many devices of addKeys.
const keyDeviceSize = 8 << 20

// addKeys adds two servers with many devices: one changes the key of a chunk
// after every request, as is the default, the other does not.
func (s *site) addKeys(context.Context) error {
	for name, change := range map[string]bool{keysChange: true, keysStay: false} {
		if !s.wants(name) {
			continue
		}
		server, err := s.memoryServer(keyDeviceSize, lab.ServerOptions{}, fmt.Sprintf("--always-invalidate=%t", change))
		if err != nil {
			return err
		}
		c := library(server.Addrs, true, numbered("ram", s.plan.devices(name))...)
		if _, _, err := s.addOurs(name, c, keyDeviceSize, server.PID()); err != nil {
			return err
		}
	}
	return nil
}
