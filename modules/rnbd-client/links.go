package client

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Names of devices that stay the same: LINKDIR/SESSION/PATH, with "!" for "/",
// lead to the device nodes, whatever their numbers are this time.

// linkName is the link of a device below the link folder.
func linkName(session, path string) string {
	clean := strings.NewReplacer("/", "!")
	return filepath.Join(clean.Replace(session), clean.Replace(path))
}

// link makes the link of d, if d has a node, and lets udev make its own. The
// names are a help, no condition: what goes wrong is logged.
func (d *Device) link() {
	node := d.Location()
	if !isNode(node) {
		return
	}
	defer d.announce(node)
	dir := d.client.cfg.LinkDir
	if dir == "" {
		return
	}
	name := filepath.Join(dir, linkName(d.session.name, d.path))
	if err := replaceLink(name, node); err != nil {
		d.log.Warn("the device has no link", "link", name, "err", err)
	}
}

// replaceLink makes name a link to node. What is there and no link stays.
func replaceLink(name, node string) error {
	if st, err := os.Lstat(name); err == nil && st.Mode()&os.ModeSymlink == 0 {
		return fmt.Errorf("%s is there and no link", name)
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	next := name + ".new" // whoever uses the old link finds one at all times
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Symlink(node, next); err != nil {
		return err
	}
	return os.Rename(next, name)
}

// announce has udev look at the node once more. When the kernel told it of the
// disk, this daemon could not say yet whose it is; and some nodes stay when
// their disk is unmapped.
func (d *Device) announce(node string) {
	err := changed(sysBlock, node)
	if err != nil && !errors.Is(err, os.ErrNotExist) { // it went with the disk
		d.log.Debug("udev is not told about the device", "node", node, "err", err)
	}
}

const sysBlock = "/sys/class/block"

// changed sends the uevent "change" of a block device; sys has their folders.
func changed(sys, node string) error {
	f, err := os.OpenFile(filepath.Join(sys, filepath.Base(node), "uevent"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("change")
	return errors.Join(err, f.Close())
}

// unlink takes the link of d away, unless it leads elsewhere by now.
func (d *Device) unlink() {
	node := d.Location()
	if !isNode(node) {
		return
	}
	defer d.announce(node)
	dir := d.client.cfg.LinkDir
	if dir == "" {
		return
	}
	name := filepath.Join(dir, linkName(d.session.name, d.path))
	if target, err := os.Readlink(name); err != nil || target != node {
		return
	}
	if err := os.Remove(name); err != nil {
		d.log.Warn("the device's link stays", "link", name, "err", err)
	}
	removeIfEmpty(filepath.Dir(name), dir)
}

// sweepLinks takes away links of a daemon that was killed: those whose nodes
// are gone.
func (c *Client) sweepLinks() {
	dir := c.cfg.LinkDir
	if dir == "" {
		return
	}
	names, _ := filepath.Glob(filepath.Join(dir, "*", "*")) // fails for a bad pattern only
	for _, name := range names {
		if _, err := os.Readlink(name); err != nil {
			continue
		}
		if _, err := os.Stat(name); errors.Is(err, os.ErrNotExist) && os.Remove(name) == nil {
			c.log.Info("stale link removed", "link", name)
			removeIfEmpty(filepath.Dir(name), dir)
		}
	}
	removeIfEmpty(dir)
}

// removeIfEmpty removes folders; one that is in use refuses.
func removeIfEmpty(dirs ...string) {
	for _, d := range dirs {
		if os.Remove(d) != nil {
			return
		}
	}
}
