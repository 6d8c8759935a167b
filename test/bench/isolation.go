package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/uring"
	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/nbdclient"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// Isolation: 16 devices of one session, one server and one plugin process. One of
// them is on a disk that stops answering while it has stuckWrites writes; the
// others have the load. They are compared with themselves without the hang.
const (
	healthy     = 15
	stuckWrites = 64
	besideHung  = ", beside a hung disk"
)

// shared names the healthy devices as they are reached by "client library" or
// "NBD front end".
func shared(by, plugin, engine string) string {
	return fmt.Sprintf("rnbd, %s, io-%s, %s", by, plugin, engine)
}

// isolationClaims ask for 0.9 of the requests per second, and for a p99 of at
// most twice as long. CPU time per request stands beside: it shows on a busy machine
// too whether the hang costs the others anything.
func isolationClaims(write bool) (all []claim) {
	w := spread(write, healthy)
	for _, row := range []struct{ id, by, plugin string }{
		{"I1", "client library", "fileio"}, {"I2", "client library", "blockio"},
		{"I3", "NBD front end", "fileio"}, {"I4", "NBD front end", "blockio"},
	} {
		for _, engine := range []string{"io_uring", "threads"} {
			alone := shared(row.by, row.plugin, engine)
			all = append(all,
				claim{row.id, w, kiops, alone + besideHung, []string{alone}, nil, 0.9},
				claim{row.id, w, tail99, alone + besideHung, []string{alone}, nil, 0.5},
				claim{row.id, w, cpuPerIO, alone + besideHung, []string{alone}, nil, 0})
		}
	}
	return all
}

// crowd is the 16 devices of one server.
type crowd struct {
	hung   *slowdisk.Disk
	names  []string // as clients name them; the last one hangs
	server *lab.Server
}

// isolation returns a function that adds the targets of one plugin with one
// engine.
func isolation(plugin, engine string) func(*site, context.Context) error {
	return func(s *site, ctx context.Context) error {
		if name := shared("client library", plugin, engine); s.wants(name) {
			if c, err := s.crowd(plugin, engine); err != nil {
				s.skip(name, err)
			} else if err := s.addCrowdLibrary(name, c); err != nil {
				return err
			}
		}
		if name := shared("NBD front end", plugin, engine); s.wants(name) && s.have(name, "fio") {
			if c, err := s.crowd(plugin, engine); err != nil {
				s.skip(name, err)
			} else if err := s.addCrowdFrontEnd(ctx, name, c); err != nil {
				return err
			}
		}
		return nil
	}
}

// crowd makes the disks and starts their server.
func (s *site) crowd(plugin, engine string) (*crowd, error) {
	if err := uring.Supported(); engine == "io_uring" && err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("a disk that hangs is a FUSE mount, which needs root")
	}
	dir, err := os.MkdirTemp(s.ram, "crowd-")
	if err != nil {
		return nil, err
	}
	c := &crowd{}
	mount := filepath.Join(dir, "hung")
	if err := os.Mkdir(mount, 0o700); err != nil {
		return nil, err
	}
	if c.hung, err = slowdisk.Open(mount, keyDeviceSize); err != nil {
		return nil, err
	}
	s.stops = append(s.stops, func() { s.try("end of the slow disk", c.hung.Close()) })
	o := lab.ServerOptions{Plugins: []string{plugin}, Extra: []string{"--log-level", "warn"},
		Env: []string{uring.EngineEnv + "=" + map[string]string{"io_uring": "uring", "threads": "threads"}[engine]}}
	files := []string{}
	for i := range healthy {
		path := filepath.Join(dir, fmt.Sprintf("disk%d", i))
		if err := fillFile(path, keyDeviceSize); err != nil {
			return nil, err
		}
		files = append(files, path)
	}
	files = append(files, c.hung.Path())
	for _, path := range files {
		if plugin == "blockio" {
			if path, err = s.attach(path); err != nil {
				return nil, err
			}
			c.names = append(c.names, path)
			continue
		}
		o.SearchPath = dir
		c.names = append(c.names, strings.TrimPrefix(path, dir+"/"))
	}
	c.server, err = s.lab.StartServer(o)
	return c, err
}

// addCrowdLibrary adds the devices by the library, with and without the hang.
func (s *site) addCrowdLibrary(name string, c *crowd) error {
	g, t, err := s.addOurs(name, library(c.server.Addrs, true, c.names...), keyDeviceSize, c.server.PID())
	if err != nil {
		return err
	}
	var ended func() error
	s.addHung(t, c, func() (err error) {
		ended, err = g.stick(stuckWrites)
		return err
	}, func() error { return ended() })
	return nil
}

// addCrowdFrontEnd adds them by the NBD front end and fio, one connection each.
func (s *site) addCrowdFrontEnd(ctx context.Context, name string, c *crowd) error {
	daemon, err := s.lab.StartClient(lab.ClientOptions{Extra: []string{"--log-level", "warn"}})
	if err != nil {
		return err
	}
	var jobs []string
	var last string
	for i, path := range c.names {
		d, err := daemon.Map(path, c.server)
		if err != nil {
			return fmt.Errorf("%s: map %s: %w", name, path, err)
		}
		if last = d.Name; i < healthy {
			jobs = append(append(jobs, fmt.Sprintf("--name=disk%d", i)), nbdEngine(daemon.URI(d.Name))...)
		}
	}
	t := &target{name: name, servers: []int{c.server.PID(), daemon.PID()},
		run: func(ctx context.Context, w workload, d time.Duration) (sample, error) {
			w.Jobs = 1 // of each name
			return runFioJobs(ctx, jobs, keyDeviceSize, w, d)
		}}
	s.targets = append(s.targets, t)
	var ended chan error
	s.addHung(t, c, func() (err error) {
		ended, err = stickExport(ctx, daemon.NBD, last)
		return err
	}, func() error { return <-ended })
	return nil
}

// stickExport starts writes to an NBD export, and closes the connection when they
// have been answered.
func stickExport(ctx context.Context, addr, export string) (chan error, error) {
	n, err := nbdclient.Dial(ctx, "unix", addr, nbdclient.Options{Export: export})
	if err != nil {
		return nil, err
	}
	errs := make(chan error, stuckWrites)
	for i := range stuckWrites {
		go func() {
			_, err := n.WriteAt(make([]byte, 4096), int64(i)*4096)
			errs <- err
		}()
	}
	ended := make(chan error, 1)
	go func() {
		var all error
		for range stuckWrites {
			all = errors.Join(all, <-errs)
		}
		ended <- errors.Join(all, n.Close())
	}()
	return ended, nil
}

// addHung adds t while the disk hangs: stick starts the writes that hang, unstick
// waits for their end.
func (s *site) addHung(t *target, c *crowd, stick, unstick func() error) {
	hung := *t
	hung.name += besideHung
	hung.verify = nil
	hung.run = func(ctx context.Context, w workload, d time.Duration) (sample, error) {
		c.hung.HoldWrites()
		if err := stick(); err != nil {
			c.hung.Release()
			return sample{}, err
		}
		err := c.awaitHeld()
		var m sample
		if err == nil {
			m, err = t.run(ctx, w, d)
		}
		if c.hung.Held() == 0 {
			err = errors.Join(err, errors.New("the disk did not hang to the end"))
		}
		c.hung.Release()
		return m, errors.Join(err, unstick())
	}
	s.targets = append(s.targets, &hung)
}

// awaitHeld waits until a write hangs.
func (c *crowd) awaitHeld() error {
	for end := time.Now().Add(10 * time.Second); c.hung.Held() == 0; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return errors.New("no write has come to the disk that hangs within 10 s")
		}
	}
	time.Sleep(20 * time.Millisecond) // for the others to come as far as they can
	return nil
}
