package main

import (
	"context"
	"fmt"
	"strconv"

	"github.com/rnbd-go/rnbd/test/lab"
)

// Names of our targets: through the NBD front end, and with the client library
// in the application's process.
const (
	frontEnd = "rnbd, NBD front end"
	direct   = "rnbd, client library"
	crcOff   = ", CRC off"
	overRoCE = "rnbd, client library over rocev2"
)

// addOurs starts a server and a client and adds what they offer.
func (s *site) addOurs(ctx context.Context) error {
	l, err := lab.Open()
	if err != nil {
		return err
	}
	s.stops = append(s.stops, func() { l.Close() })
	if err := s.addPair(ctx, l, true); err != nil {
		return err
	}
	if err := s.addPair(ctx, l, false); err != nil {
		return err
	}
	return s.addRoCE(l)
}

// The two ends of rocev2: loopback addresses, which take packets of 4 KiB and
// more, so that the path MTU is RoCE's largest.
const roceServer, roceClient = "127.0.0.1", "127.0.0.2"

// addRoCE adds a server that the library reaches over rocev2.
func (s *site) addRoCE(l *lab.Lab) error {
	server, err := l.StartServer(lab.ServerOptions{
		SearchPath: s.dir, Plugins: []string{"memory"},
		Extra: []string{"--io-mode", "ram*=memory", "--io-config", "memory:size=" + strconv.FormatInt(s.size, 10),
			"--log-level", "warn", "--listen", "rocev2://" + roceServer + ":1234"},
	})
	if err != nil {
		return err
	}
	return s.addWorker(classRAM, overRoCE, workerConfig{kind: "rnbd", fabric: "rocev2",
		addr: roceClient + "@" + roceServer + ":1234%rocev2", device: "ram-roce"}, server.PID())
}

// addPair adds one server with one client. Without CRC only the RAM is of
// interest: what the checksum costs is the same for all.
func (s *site) addPair(ctx context.Context, l *lab.Lab, crc bool) error {
	flag := []string{"--log-level", "warn"}
	suffix := ""
	if !crc {
		flag, suffix = append(flag, "--mpa-crc=false"), crcOff
	}
	server, err := l.StartServer(lab.ServerOptions{
		SearchPath: s.dir, Plugins: []string{"memory", "fileio"},
		Extra: append([]string{"--io-mode", "ram*=memory", "--io-config", "memory:size=" + strconv.FormatInt(s.size, 10)}, flag...),
	})
	if err != nil {
		return err
	}
	client, err := l.StartClient(lab.ClientOptions{Extra: flag})
	if err != nil {
		return err
	}
	p := pair{s, server, client, crc}
	if err := p.add(ctx, classRAM, suffix, "ram-nbd", "ram-lib"); err != nil || !crc {
		return err
	}
	for _, f := range [][3]string{
		{classCached, "cached-nbd", "cached-lib"},
		{classDirect, "direct-nbd", "direct-lib"},
	} {
		for _, name := range f[1:] {
			if _, err := s.disk(name); err != nil {
				return err
			}
		}
		if err := p.add(ctx, f[0], "", f[1], f[2]); err != nil {
			return err
		}
	}
	return nil
}

// pair is one server and one client of ours.
type pair struct {
	site   *site
	server *lab.Server
	client *lab.Client
	crc    bool
}

// add adds two devices of the server: one for the front end, one for the
// library.
func (p pair) add(ctx context.Context, class, suffix, nbdName, libName string) error {
	d, err := p.client.Map(nbdName, p.server)
	if err != nil {
		return fmt.Errorf("map %s: %w", nbdName, err)
	}
	if class == classRAM {
		if err := fillExport(ctx, p.client.NBD, d.Name); err != nil {
			return fmt.Errorf("fill %s: %w", nbdName, err)
		}
	}
	p.site.addFio(class, frontEnd+suffix, p.client.URI(d.Name), p.server.PID(), p.client.PID())
	return p.site.addWorker(class, direct+suffix, workerConfig{kind: "rnbd", addr: p.server.Addrs[0], device: libName, crc: p.crc}, p.server.PID())
}
