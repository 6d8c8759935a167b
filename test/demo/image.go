package main

import (
	"bytes"
	"compress/gzip"
	_ "embed"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/rnbd-go/rnbd/test/lab"
)

// imageSize is the size of an image that is made here, in bytes.
const imageSize = 96 << 20

// shipped is an ext4 image of 8 MiB with this folder in it, for machines
// without mke2fs.
//
//go:embed image.ext4.gz
var shipped []byte

// makeImage makes an ext4 file system with the project's sources in it.
func (d *demo) makeImage() error {
	d.image = filepath.Join(d.lab.Dir, "images", "demo.ext4")
	if err := os.Mkdir(filepath.Dir(d.image), 0o755); err != nil {
		return err
	}
	how := "mke2fs"
	if mke2fs := findTool("mke2fs"); mke2fs == "" || d.mke2fs(mke2fs) != nil {
		how = "shipped"
		if err := unpack(d.image); err != nil {
			return err
		}
	}
	st, err := os.Stat(d.image)
	if err != nil {
		return err
	}
	d.size = st.Size()
	say("image     %s, ext4 (%s)", bytesOf(d.size), how)
	return nil
}

func (d *demo) mke2fs(tool string) error {
	if err := os.WriteFile(d.image, nil, 0o644); err != nil {
		return err
	}
	if err := os.Truncate(d.image, imageSize); err != nil {
		return err
	}
	tree := filepath.Join(lab.Root(), "modules")
	out, err := exec.Command(tool, "-q", "-t", "ext4", "-d", tree, d.image).CombinedOutput()
	if err != nil {
		return fmt.Errorf("mke2fs: %w: %s", err, out)
	}
	return nil
}

// findTool looks where unprivileged users have no PATH too.
func findTool(name string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if path := filepath.Join(dir, name); executable(path) {
			return path
		}
	}
	return ""
}

func executable(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0
}

func unpack(path string) error {
	z, err := gzip.NewReader(bytes.NewReader(shipped))
	if err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(f, z)
	return err
}
