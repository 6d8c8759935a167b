package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
)

// Storage plugins are compared with fio on the same file and block device, on
// the same machine. Two plugins do not write to one store, so that of a plugin
// that is measured alone is another one, of the same kind.
const (
	localFile = "fio io_uring, the file"
	localLoop = "fio io_uring, the loop device"
	ringFile  = "fio io_uring, the plugin's file"
	ringLoop  = "fio io_uring, the plugin's loop device"
)

// store is a file on a disk, or a loop device on such a file, with a plugin of
// ours and fio on it.
type store struct {
	ours, local string
	plugin      string
	loop        bool
}

// addDisks serves stores over the network.
func (s *site) addDisks(context.Context) error {
	return s.addStores(s.serve, store{ioFileio, localFile, "fileio", false}, store{ioBlockio, localLoop, "blockio", true})
}

// addPlugins has the load generator use the plugins itself, as a server does.
func (s *site) addPlugins(context.Context) error {
	return s.addStores(s.alone, store{ringFileio, ringFile, "fileio", false}, store{ringBlockio, ringLoop, "blockio", true})
}

// addStores adds each store by a plugin and by fio on it directly. Both write past
// the page cache; a file is read through it, as io-fileio does, a device is not.
func (s *site) addStores(ours func(store, string) error, stores ...store) error {
	for _, st := range stores {
		if !s.wants(st.ours) || !s.have(st.local, "fio") {
			continue
		}
		place := s.disk
		if st.loop {
			place = s.loop
		}
		path, err := place(st.plugin)
		if err != nil && st.loop {
			s.skip(st.ours, err)
			continue
		} else if err != nil {
			return err
		}
		first := len(s.targets)
		if err := ours(st, path); err != nil {
			return err
		}
		s.try(floors[st.ours], s.addFloorDisk(floors[st.ours], path, st.loop))
		s.addLocal(st.local, path, st.loop)
		if st.loop {
			continue
		}
		for _, t := range s.targets[first:] {
			t.cached = path
		}
	}
	return nil
}

// loop makes a filled file with a loop device over it.
func (s *site) loop(name string) (string, error) {
	if os.Geteuid() != 0 {
		return "", fmt.Errorf("a loop device needs root")
	}
	path, err := s.disk(name)
	if err != nil {
		return "", err
	}
	return s.attach(path)
}

// attach puts a loop device over a file. The loop device ends with the site.
func (s *site) attach(path string) (string, error) {
	out, err := exec.Command("losetup", "--find", "--show", "--direct-io=on", path).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("losetup: %w: %s", err, out)
	}
	device := strings.TrimSpace(string(out))
	s.stops = append(s.stops, func() { exec.Command("losetup", "--detach", device).Run() })
	return device, nil
}

func (s *site) serve(st store, path string) error {
	server, err := s.lab.StartServer(lab.ServerOptions{SearchPath: filepath.Dir(path), Plugins: []string{st.plugin},
		Extra: []string{"--log-level", "warn"}})
	if err != nil {
		return err
	}
	_, _, err = s.addOurs(st.ours, library(server.Addrs, true, filepath.Base(path)), s.Size, server.PID())
	return err
}

func (s *site) alone(st store, path string) error {
	bin, err := lab.Bin()
	if err != nil {
		return err
	}
	c := generatorConfig{devices: []string{path}, args: []string{"--plugin", filepath.Join(bin, "io-"+st.plugin)}}
	_, t, err := s.addOurs(st.ours, c, s.Size)
	if err == nil {
		t.servers = lab.Children(t.generator)
	}
	return err
}

// addLocal adds fio on a file or device of this machine.
func (s *site) addLocal(name, path string, directReads bool) {
	t := &target{name: name}
	t.run = func(ctx context.Context, w workload, d time.Duration) (sample, error) {
		engine := []string{"--ioengine=io_uring", "--filename=" + path, "--direct=0", "--invalidate=0"}
		if w.Write || directReads {
			engine[2] = "--direct=1"
		}
		return runFio(ctx, engine, s.Size, w, d)
	}
	s.targets = append(s.targets, t)
}

// warm brings a file that is read through the page cache into it: direct
// writes have thrown it out.
func (t *target) warm(w workload) error {
	if t.cached == "" || w.Write {
		return nil
	}
	f, err := os.Open(t.cached)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, make([]byte, 1<<20)); err != nil {
		return fmt.Errorf("read %s into the page cache: %w", t.cached, err)
	}
	return nil
}
