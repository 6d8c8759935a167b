package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// pkgs are the Debian packages of one kernel build.
type pkgs struct {
	release string // 6.12.1+deb12-amd64
	names   []string
	source  string
}

var dependsOnImage = regexp.MustCompile(`(?m)Depends: linux-image-(\S+-amd64)$`)

// packages asks apt for the packages of the series. All have one version.
func packages() (pkgs, error) {
	out, err := exec.Command("apt-cache", "depends", "linux-image-"+series+"-amd64").Output()
	m := dependsOnImage.FindSubmatch(out)
	if err == nil && m == nil {
		err = errors.New("it depends on no image")
	}
	if err != nil {
		return pkgs{}, fmt.Errorf("package linux-image-%s-amd64: %w", series, err)
	}
	release := string(m[1])
	version := strings.TrimSuffix(release, "-amd64")
	return pkgs{
		release: release,
		names:   []string{"linux-image-" + release, "linux-headers-" + release, "linux-headers-" + version + "-common", "linux-kbuild-" + version},
		source:  "linux-source-" + series,
	}, nil
}

// builder fills dir.
type builder struct {
	dir, release, root string
}

func (b builder) deb() string { return filepath.Join(b.dir, "deb") }

// fetch downloads packages into the new folder dir; if it fails, there is
// none.
func (b builder) fetch(names ...string) error {
	if err := os.RemoveAll(b.dir); err != nil { // of a run that was broken off
		return err
	}
	err := download(b.deb(), names...)
	if err != nil {
		os.RemoveAll(b.dir)
	}
	return err
}

// run makes the files for a guest of the packages.
func (b builder) run(p pkgs) error {
	deb := b.deb()
	for _, name := range p.names {
		if err := b.unpack(deb, name); err != nil {
			return err
		}
	}
	if err := b.headers(); err != nil {
		return err
	}
	if err := b.sources(deb, p.source); err != nil {
		return err
	}
	for _, m := range outOfTree {
		if err := b.module(m); err != nil {
			return err
		}
	}
	if err := command(b.dir, "depmod", "-b", b.root, b.release); err != nil {
		return err
	}
	for _, done := range []string{"deb", "src", "root/usr"} {
		if err := os.RemoveAll(filepath.Join(b.dir, done)); err != nil {
			return err
		}
	}
	return nil
}

// file finds the one downloaded file of a package.
func file(deb, name string) (string, error) {
	files, _ := filepath.Glob(filepath.Join(deb, name+"_*.deb"))
	if len(files) != 1 {
		return "", fmt.Errorf("package %s: %d files were downloaded", name, len(files))
	}
	return files[0], nil
}

func (b builder) unpack(deb, name string) error {
	f, err := file(deb, name)
	if err != nil {
		return err
	}
	return command(b.dir, "dpkg-deb", "-x", f, b.root)
}

func (b builder) headerDir() string {
	return filepath.Join(b.root, "usr", "src", "linux-headers-"+b.release)
}

// headers makes the unpacked headers work where they are.
func (b builder) headers() error {
	name := filepath.Join(b.headerDir(), "Makefile")
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	text = bytes.ReplaceAll(text, []byte("include /usr/src"), []byte("include "+b.root+"/usr/src"))
	if err := os.WriteFile(name, text, 0o644); err != nil {
		return err
	}
	// It is there for type information of modules; those need one more tool.
	return os.RemoveAll(filepath.Join(b.headerDir(), "vmlinux"))
}

type outModule struct {
	dir   string // in the kernel's source
	flags []string
	files []string
}

// outOfTree are the modules that are built from source, in order.
var outOfTree = []outModule{
	{"drivers/infiniband/ulp/rtrs",
		[]string{"CONFIG_INFINIBAND_RTRS=m", "CONFIG_INFINIBAND_RTRS_CLIENT=m", "CONFIG_INFINIBAND_RTRS_SERVER=m"},
		[]string{"rtrs-core.ko", "rtrs-client.ko", "rtrs-server.ko"}},
	{"drivers/block/rnbd",
		[]string{"CONFIG_BLK_DEV_RNBD=y", "CONFIG_BLK_DEV_RNBD_CLIENT=m", "CONFIG_BLK_DEV_RNBD_SERVER=m"},
		[]string{"rnbd-client.ko", "rnbd-server.ko"}},
	{"drivers/infiniband/sw/siw", []string{"CONFIG_RDMA_SIW=m"}, []string{"siw.ko"}},
}

// sources unpacks the folders of outOfTree.
func (b builder) sources(deb, name string) error {
	f, err := file(deb, name)
	if err != nil {
		return err
	}
	src := filepath.Join(b.dir, "src")
	if err := os.MkdirAll(src, 0o755); err != nil {
		return err
	}
	var dirs []string
	for _, m := range outOfTree {
		dirs = append(dirs, name+"/"+m.dir)
	}
	script := `set -o pipefail; dpkg-deb --fsys-tarfile "$0" | tar xO ./usr/src/"$1".tar.xz | xz -dc | tar x --strip-components=1 -C "$2" "${@:3}"`
	if err := command(b.dir, "bash", append([]string{"-c", script, f, name, src}, dirs...)...); err != nil {
		return err
	}
	for _, m := range outOfTree {
		if _, err := os.Stat(filepath.Join(src, m.dir, "Makefile")); err != nil {
			return fmt.Errorf("package %s has no %s", name, m.dir)
		}
	}
	return nil
}

// module builds one folder and puts the modules where depmod finds them.
func (b builder) module(m outModule) error {
	src := filepath.Join(b.dir, "src")
	rtrs := filepath.Join(src, outOfTree[0].dir)
	args := []string{"-s", "-j2", "-C", b.headerDir(), "M=" + filepath.Join(src, m.dir), "modules"}
	if m.dir != outOfTree[0].dir {
		args = append(args, "KCPPFLAGS=-I"+rtrs, "KBUILD_EXTRA_SYMBOLS="+filepath.Join(rtrs, "Module.symvers"))
	}
	if err := command(b.dir, "make", append(args, m.flags...)...); err != nil {
		return err
	}
	extra := filepath.Join(b.root, "lib", "modules", b.release, "extra")
	if err := os.MkdirAll(extra, 0o755); err != nil {
		return err
	}
	for _, f := range m.files {
		if err := os.Rename(filepath.Join(src, m.dir, f), filepath.Join(extra, f)); err != nil {
			return err
		}
	}
	return nil
}
