package client

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Lasting names of devices: LINKDIR/SESSION/PATH, with "!" for "/", are links
// to device nodes. The numbers of the nodes may change.

// linkName returns the link of a device, relative to the link folder.
func linkName(session, path string) string {
	clean := strings.NewReplacer("/", "!")
	return filepath.Join(clean.Replace(session), clean.Replace(path))
}

// makeLink makes the link of d. A missing link is no failure: errors are logged.
func (d *Device) makeLink() {
	d.changeLink(func(name, node string) {
		if err := replaceLink(name, node); err != nil {
			d.log.Warn("the device has no link", "link", name, "err", err)
		}
	})
}

// removeLink removes the link of d, unless it points to another node by now.
func (d *Device) removeLink() {
	d.changeLink(func(name, node string) {
		if target, err := os.Readlink(name); err != nil || target != node {
			return
		}
		if err := os.Remove(name); err != nil {
			d.log.Warn("the device's link stays", "link", name, "err", err)
		}
		removeIfEmpty(filepath.Dir(name), d.client.cfg.LinkDir)
	})
}

// changeLink calls change with the name of d's link and d's node, and makes udev
// process the node. Without a node it does nothing, without a folder of links it
// does not call change.
func (d *Device) changeLink(change func(name, node string)) {
	node := d.Location()
	if !isNode(node) {
		return
	}
	if dir := d.client.cfg.LinkDir; dir != "" {
		change(filepath.Join(dir, linkName(d.session.name, d.path)), node)
	}
	d.announceNode(node)
}

// onLocationChange handles a change of d's location.
func (c *Client) onLocationChange(d *Device) {
	c.mapMu.Lock()
	defer c.mapDone()
	if c.deviceAt(d.index) != d { // it was unmapped meanwhile
		return
	}
	d.makeLink()
	c.requestSave()
}

// replaceLink makes name a link to node. An existing file that is no link
// stays.
func replaceLink(name, node string) error {
	if st, err := os.Lstat(name); err == nil && st.Mode()&os.ModeSymlink == 0 {
		return fmt.Errorf("%s is there and no link", name)
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	next := name + ".new" // so that there is a link at all times
	if err := os.Remove(next); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Symlink(node, next); err != nil {
		return err
	}
	return os.Rename(next, name)
}

// announceNode makes udev process the node again. The kernel's first event came
// before this daemon knew the owner of the disk. Some nodes also stay when
// their disk is unmapped.
func (d *Device) announceNode(node string) {
	err := sendChange(sysBlock, node)
	if err != nil && !errors.Is(err, os.ErrNotExist) { // it went with the disk
		d.log.Debug("udev is not told about the device", "node", node, "err", err)
	}
}

const sysBlock = "/sys/class/block"

// sendChange sends the uevent "change" of a block device. sys is the folder of
// block devices in sysfs.
func sendChange(sys, node string) error {
	f, err := os.OpenFile(filepath.Join(sys, filepath.Base(node), "uevent"), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString("change")
	return errors.Join(err, f.Close())
}

// sweepLinks removes links of a killed daemon: those to nodes that are gone.
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

// removeIfEmpty removes folders. Those that are not empty stay.
func removeIfEmpty(dirs ...string) {
	for _, d := range dirs {
		if os.Remove(d) != nil {
			return
		}
	}
}
