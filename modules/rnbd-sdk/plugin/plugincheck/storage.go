package plugincheck

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugincheck/medium"
)

// diskSize is the size of the files that the kit makes, in bytes.
const diskSize = 16 << 20

// storage is where a disk of the kit lies.
type storage struct {
	dir    string         // what {dir} in settings stands for
	name   string         // of the disk
	path   string         // of the file, for plugins with paths as names; empty: opaque
	file   string         // that holds the data, if the kit has made it
	medium *medium.Medium // nil: an ordinary file system
}

// hasDir reports whether the settings put the plugin's storage into a folder of the kit.
func (o Options) hasDir() bool {
	for _, v := range o.Config {
		if strings.Contains(v, "{dir}") {
			return true
		}
	}
	return false
}

// config returns the settings with the folder in them.
func (o Options) config(dir string) map[string]string {
	c := make(map[string]string, len(o.Config))
	for k, v := range o.Config {
		c[k] = strings.ReplaceAll(v, "{dir}", dir)
	}
	return c
}

// plain returns storage on an ordinary file system. Each call returns another disk, except
// where the user has named one.
func (t *T) plain() *storage {
	dir := t.tempDir()
	return t.storageAt(dir, t.newFile(dir, medium.FileName))
}

// newFile makes an empty file for a disk.
func (t *T) newFile(dir, name string) string {
	path := filepath.Join(dir, name)
	t.must("make a disk", os.WriteFile(path, nil, 0o666))
	t.must("make a disk", os.Truncate(path, diskSize))
	return path
}

func (t *T) storageAt(dir, file string) *storage {
	s := &storage{dir: dir, name: filepath.Base(file), file: file}
	if t.info.Names == plugin.NamesPath {
		s.path = t.node(file)
	}
	if t.o.Disk != "" {
		s.name, s.file = t.o.Disk, ""
		if t.info.Names == plugin.NamesPath {
			s.path = t.o.Disk
		}
	}
	return s
}

// node returns the file, or a loop device over it for a plugin that takes only devices.
func (t *T) node(file string) string {
	if t.o.Disk != "" || t.info.Matches&plugin.RegularFiles != 0 {
		return file
	}
	l, err := attachLoop(file)
	if err != nil {
		t.Skipf("the plugin serves block devices, and a loop device over a file cannot be made: %v; name one with --name", err)
	}
	t.Cleanup(l.detach)
	return l.path
}

// onMedium returns storage whose medium the check controls.
func (t *T) onMedium() *storage {
	switch {
	case t.o.Disk != "":
		t.Skipf("the disk is the user's, and this check needs the kit's own medium: leave out --name")
	case t.info.Names == plugin.NamesOpaque && !t.o.hasDir():
		t.Skipf("the plugin's storage is not the kit's: put {dir} into a setting that names its folder")
	case t.o.Backend != nil:
		t.Skipf("the plugin runs in the kit's process, which serves the medium")
	}
	if err := medium.Available(); err != nil {
		t.Skipf("the kit's own medium needs FUSE: %v", err)
	}
	dir := t.tempDir()
	m, err := medium.Mount(dir, diskSize)
	t.must("the kit's medium", err)
	t.Cleanup(func() { _ = m.Close() })
	s := t.storageAt(dir, m.Path())
	s.medium = m
	t.Cleanup(m.Release) // before the loop device over it is detached
	return s
}

// open opens the node for a plugin; nil for a name of the plugin's own.
func (s *storage) open() (*os.File, error) {
	if s.path == "" {
		return nil, nil
	}
	fd, err := unix.Open(s.path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", s.path, err)
	}
	return os.NewFile(uintptr(fd), s.path), nil
}
