package kernel

import (
	"os"
	"path/filepath"
)

// Unpack returns a folder with the files of a package of the host's Debian.
// The package is not installed: the effects of its scripts on the host are not
// wanted.
func Unpack(pkg string) (root string, err error) {
	return withCache(func(cache string) (string, error) {
		dir := filepath.Join(cache, "package-"+pkg)
		b := builder{dir: dir, root: filepath.Join(dir, "root")}
		if _, err := os.Stat(filepath.Join(dir, "complete")); err == nil {
			return b.root, nil
		}
		if err := withIndex(func() error { return b.fetch(pkg) }); err != nil {
			return "", err
		}
		if err := b.unpack(b.deb(), pkg); err != nil {
			return "", err
		}
		return b.root, complete(dir, pkg)
	})
}
