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

// What the storage plugins are compared with: fio on the same file and block
// device, on the same machine.
const (
	localFile = "fio io_uring, the file"
	localLoop = "fio io_uring, the loop device"
)

// addDisks serves a file on a disk by io-fileio, and a loop device on such a
// file by io-blockio.
func (s *site) addDisks(context.Context) error {
	if s.wants(ioFileio) && s.have(localFile, "fio") {
		path, err := s.disk("file")
		if err != nil {
			return err
		}
		if err := s.addDisk(ioFileio, localFile, "fileio", path, false); err != nil {
			return err
		}
	}
	if !s.wants(ioBlockio) || !s.have(localLoop, "fio", "losetup") {
		return nil
	}
	path, err := s.loop()
	if err != nil {
		s.skip(ioBlockio, err)
		return nil
	}
	return s.addDisk(ioBlockio, localLoop, "blockio", path, true)
}

// loop attaches a file to a loop device, which ends with the site.
func (s *site) loop() (string, error) {
	if os.Geteuid() != 0 {
		return "", fmt.Errorf("a loop device needs root")
	}
	path, err := s.disk("loop")
	if err != nil {
		return "", err
	}
	out, err := exec.Command("losetup", "--find", "--show", "--direct-io=on", path).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("losetup: %w: %s", err, out)
	}
	device := strings.TrimSpace(string(out))
	s.stops = append(s.stops, func() { exec.Command("losetup", "--detach", device).Run() })
	return device, nil
}

// addDisk adds what is at path, by a plugin of ours and by fio on it directly.
// Both write past the page cache; a file is read through it, as io-fileio
// does, a device is not.
func (s *site) addDisk(ours, local, plugin, path string, directReads bool) error {
	server, err := s.lab.StartServer(lab.ServerOptions{SearchPath: filepath.Dir(path), Plugins: []string{plugin},
		Extra: []string{"--log-level", "warn"}})
	if err != nil {
		return err
	}
	c := workerConfig{kind: "rnbd", addrs: server.Addrs, device: filepath.Base(path), crc: true}
	if err := s.addWorker(ours, c, server.PID()); err != nil {
		return err
	}
	s.addLocal(local, path, directReads)
	if !directReads {
		for _, t := range s.targets[len(s.targets)-2:] {
			t.cached = path
		}
	}
	return nil
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
