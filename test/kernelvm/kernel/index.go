package kernel

import (
	"errors"
	"os"
	"strings"
	"time"
)

// withIndex does f, and if it fails once more with a new index of packages: an
// old one lacks some, and names files that the mirror has no more.
func withIndex(f func() error) error {
	err := f()
	if err == nil || os.Getuid() != 0 {
		return err
	}
	if renewed := update(); renewed != nil {
		return errors.Join(err, renewed)
	}
	return f()
}

// update renews the index of packages. It waits for another apt that does the
// same, as apt itself does for installations only.
func update() (err error) {
	for range 60 {
		err = command("", "apt-get", "update", "-qq")
		if err == nil || !strings.Contains(err.Error(), "Could not get lock") {
			break
		}
		time.Sleep(5 * time.Second)
	}
	return err
}

// download gets packages into a new folder.
func download(dir string, names ...string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// As root apt wants to drop privileges, and then cannot write here.
	return command(dir, "apt-get", append([]string{"-o", "APT::Sandbox::User=root", "download", "-qq"}, names...)...)
}
