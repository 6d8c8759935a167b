package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
)

// Mounts that outlive their attachment: of devices that are to be mapped again, by this
// process or, after a hand-over, by the next one. Their users wait.

func (k *keptFiles) keep(identity string, m *mountedFile) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.byID == nil {
		k.byID = map[string]*mountedFile{}
	}
	k.byID[identity] = m
}

// take returns the mount, which is the caller's then, or nil.
func (k *keptFiles) take(identity string) *mountedFile {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.byID[identity]
	delete(k.byID, identity)
	return m
}

func (k *keptFiles) has(identity string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.byID[identity] != nil
}

// all returns the mounts. They stay kept.
func (k *keptFiles) all() map[string]*mountedFile {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.byID)
}

// endFile removes a mount by force, and the loop device on its file. Users of the loop
// device keep it and get errors.
func (c *Client) endFile(m *mountedFile) error {
	if m.disk {
		ctx, cancel := context.WithTimeout(context.Background(), forcedClose)
		defer cancel()
		if err := c.cfg.LoopTool.Detach(ctx, m.path, true); err != nil {
			c.log.Warn("loop device of an unmapped device stays until losetup removes it", "file", m.path, "err", err)
		}
	}
	return m.unmountFile(true)
}

// endKept removes the mount that is kept for a mapping that is given up. The caller holds
// mapMu.
func (c *Client) endKept(identity string) {
	m := c.files.take(identity)
	if m == nil {
		return
	}
	c.retiring.Go(func() {
		if err := c.endFile(m); err != nil {
			c.log.Error("mount of a device that was given up stays until umount removes it", "err", err)
		}
	})
}

// savedFile is a mount in the state of a hand-over. Its descriptor travels as a
// connection.
type savedFile struct {
	Identity string `json:"identity"` // of the mapping
	Path     string `json:"path"`
	Helper   bool   `json:"helper,omitempty"` // fusermount3 has mounted it
	Node     string `json:"node,omitempty"`   // of the loop device
}

// fileMark stands before the identity of the mapping in the name of a connection that has
// the descriptor of a mount. No device has such a name.
const fileMark = "/file/"

// saveFiles returns the mounts without their descriptors.
func saveFiles(files map[string]*mountedFile) (all []savedFile) {
	for _, id := range slices.Sorted(maps.Keys(files)) {
		m := files[id]
		all = append(all, savedFile{Identity: id, Path: m.path, Helper: m.helper, Node: m.node})
	}
	return all
}

// fileConnections returns the descriptors of mounts. They stay those of the mounts.
func fileConnections(files map[string]*mountedFile) (all []plugin.Connection) {
	for _, id := range slices.Sorted(maps.Keys(files)) {
		all = append(all, plugin.Connection{Device: fileMark + id, FDs: []int{int(files[id].channel.Fd())}})
	}
	return all
}

// splitFiles is the reverse of saveFiles and fileConnections. It returns the connections
// of users and the mounts, which own the descriptors then.
func splitFiles(saved []savedFile, conns []plugin.Connection) (users []plugin.Connection, files map[string]*mountedFile, err error) {
	files = map[string]*mountedFile{}
	for i := range conns {
		id, isFile := strings.CutPrefix(conns[i].Device, fileMark)
		if !isFile {
			users = append(users, conns[i])
			continue
		}
		at := slices.IndexFunc(saved, func(s savedFile) bool { return s.Identity == id })
		if at < 0 || len(conns[i].FDs) != 1 || files[id] != nil {
			err = errors.Join(err, fmt.Errorf("descriptor of a mount %q without a record: %w", id, syscall.EPROTO))
			plugin.CloseConnections(conns[i : i+1])
			continue
		}
		s := saved[at]
		files[id] = &mountedFile{
			path: s.Path, helper: s.Helper, node: s.Node, disk: s.Node != "", served: true, channel: os.NewFile(uintptr(conns[i].FDs[0]), s.Path),
		}
	}
	if err == nil && len(files) != len(saved) {
		err = fmt.Errorf("descriptors of %d mounts, want %d: %w", len(files), len(saved), syscall.EPROTO)
	}
	return users, files, err
}

// closeFiles closes the descriptors of mounts that another process serves.
func closeFiles(files map[string]*mountedFile) {
	for _, m := range files {
		m.channel.Close()
	}
}
