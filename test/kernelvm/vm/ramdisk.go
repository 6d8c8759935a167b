package vm

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/rnbd-go/rnbd/test/kernelvm/kernel"
	"github.com/rnbd-go/rnbd/test/kernelvm/vm/wire"
	"github.com/rnbd-go/rnbd/test/lab"
)

// ramDisk is a cpio archive ("newc") as the kernel unpacks it at boot.
type ramDisk struct {
	buf     bytes.Buffer
	inode   int
	modules []string // paths in the archive, dependencies first
}

func (d *ramDisk) add(name string, mode uint32, data []byte) {
	d.inode++
	fmt.Fprintf(&d.buf, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X",
		d.inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name)+1, 0)
	d.buf.WriteString(name)
	d.buf.WriteByte(0)
	d.pad()
	d.buf.Write(data)
	d.pad()
}

func (d *ramDisk) pad() {
	for d.buf.Len()%4 != 0 {
		d.buf.WriteByte(0)
	}
}

func (d *ramDisk) addFile(name, path string, perm uint32) error {
	b, err := os.ReadFile(path)
	if err == nil {
		d.add(name, 0o100000|perm, b)
	}
	return err
}

// addModules adds modules with all that they depend on.
func (d *ramDisk) addModules(k kernel.Kernel, names ...string) error {
	tree := filepath.Join(k.Modules, k.Release)
	text, err := os.ReadFile(filepath.Join(tree, "modules.dep"))
	if err != nil {
		return err
	}
	deps := map[string][]string{} // file and its dependencies, the deepest last
	for line := range strings.Lines(string(text)) {
		file, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		name, _, _ := strings.Cut(filepath.Base(file), ".")
		deps[name] = append([]string{file}, strings.Fields(rest)...)
	}
	for _, name := range names {
		if deps[name] == nil {
			return fmt.Errorf("kernel %s has no module %s", k.Release, name)
		}
		for _, file := range slices.Backward(deps[name]) {
			if err := d.addModule(filepath.Join(tree, file)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *ramDisk) addModule(path string) error {
	name := strings.TrimSuffix(filepath.Base(path), ".xz")
	if slices.Contains(d.modules, "/"+name) {
		return nil
	}
	image, err := os.ReadFile(path)
	if err == nil && strings.HasSuffix(path, ".xz") {
		image, err = exec.Command("xz", "-dc", path).Output()
	}
	if err != nil {
		return err
	}
	d.add(name, 0o100644, image)
	d.modules = append(d.modules, "/"+name)
	return nil
}

// RamDisk writes an initial ram disk that loads modules, with all that they
// depend on, and boots the root on a block device, as "/dev/vda".
func RamDisk(path string, k kernel.Kernel, root string, modules ...string) error {
	return buildRamDisk(path, k, wire.Config{Root: root}, modules...)
}

// buildRamDisk writes a ram disk of agent, modules and configuration.
func buildRamDisk(path string, k kernel.Kernel, c wire.Config, modules ...string) error {
	agent := filepath.Join(filepath.Dir(path), "init")
	build := exec.Command("go", "build", "-o", agent, "./vm/agent")
	build.Dir = filepath.Join(lab.Root(), "test", "kernelvm")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the agent: %w\n%s", err, out)
	}
	d := ramDisk{}
	if err := d.addModules(k, modules...); err != nil {
		return err
	}
	if err := d.addFile("init", agent, 0o755); err != nil {
		return err
	}
	c.Modules = d.modules
	return d.write(path, c)
}

func (d *ramDisk) write(path string, c wire.Config) error {
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	d.add("config", 0o100644, b)
	d.add("dev", 0o40755, nil)
	d.add("TRAILER!!!", 0, nil)
	return os.WriteFile(path, d.buf.Bytes(), 0o644)
}
