package main

import (
	"errors"
	"maps"
	"os"
	"path"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// kernelNet has what the kernel knows of interfaces, so that the tree of control files can
// be bound over /sys/class/net: the interfaces and files that are not in the tree are links
// to those of the kernel below /sys/devices.
type kernelNet struct {
	mu    sync.Mutex
	class *os.File // class/net of a sysfs that nothing is mounted over; nil: there is none. mu guards it.
}

// openKernelNet returns the interfaces of this process's network namespace. It mounts a
// sysfs nowhere: /sys/class/net may be covered by a tree of this daemon, whose files the
// daemon must not touch. Without the right to do so it takes /sys, if it is not covered.
func openKernelNet() (*kernelNet, error) {
	fd, err := openSysfs()
	if err != nil {
		return &kernelNet{}, err
	}
	return &kernelNet{class: os.NewFile(uintptr(fd), "class/net")}, nil
}

func openSysfs() (fd int, err error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC
	if root, err := mountSysfs(); err == nil {
		defer unix.Close(root)
		return unix.Openat(root, "class/net", flags, 0)
	}
	fd, err = unix.Open("/sys/class/net", flags, 0)
	if err != nil {
		return -1, err
	}
	var s unix.Statfs_t
	if err := unix.Fstatfs(fd, &s); err != nil || s.Type != unix.SYSFS_MAGIC {
		unix.Close(fd)
		return -1, errors.Join(err, unix.ENOTSUP)
	}
	return fd, nil
}

// mountSysfs returns the root of a new mount of sysfs that has no place.
func mountSysfs() (root int, err error) {
	fs, err := unix.Fsopen("sysfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, err
	}
	defer unix.Close(fs)
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, err
	}
	return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOEXEC)
}

// Close ends the use of the kernel's files.
func (k *kernelNet) Close() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.class == nil {
		return nil
	}
	class := k.class
	k.class = nil // requests to the tree may still come
	return class.Close()
}

// list returns the names in a folder below class/net.
func (k *kernelNet) list(folder string) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.class == nil {
		return nil
	}
	fd, err := unix.Openat(int(k.class.Fd()), folder, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	f := os.NewFile(uintptr(fd), folder)
	defer f.Close()
	names, _ := f.Readdirnames(-1) // a folder that goes meanwhile has none
	return names
}

// names returns the kernel's interfaces.
func (k *kernelNet) names() []string {
	return slices.DeleteFunc(k.list("."), func(name string) bool { return k.place(name) == "" })
}

// place returns the folder of an interface below /sys/devices; empty: there is none.
func (k *kernelNet) place(name string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.class == nil || strings.ContainsRune(name, '/') {
		return ""
	}
	target := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(k.class.Fd()), name, target)
	below, ok := strings.CutPrefix(string(target[:max(n, 0)]), "../../devices/")
	if err != nil || !ok {
		return ""
	}
	return "/sys/devices/" + below
}

// exists reports whether the kernel has a file below class/net.
func (k *kernelNet) exists(file string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	var st unix.Stat_t
	return k.class != nil && unix.Fstatat(int(k.class.Fd()), file, &st, unix.AT_SYMLINK_NOFOLLOW) == nil
}

// link returns the link to an interface, nil if the kernel has none of that name.
func (k *kernelNet) link(name string) ctltree.Node {
	if place := k.place(name); place != "" {
		return ctltree.Link(place)
	}
	return nil
}

// with returns own and what else the kernel has in the folder of an interface.
func (k *kernelNet) with(name string, own ctltree.Node) ctltree.Node {
	dir, ok := own.(ctltree.Dir)
	if !ok || k.place(name) == "" {
		return own
	}
	return k.merged(name, k.place(name), dir)
}

// merged returns own and the entries of folder, which is at place, that own does not have.
func (k *kernelNet) merged(folder, place string, own ctltree.Dir) ctltree.Dir {
	return ctltree.Listing{
		Names: func() []string {
			all := map[string]bool{}
			for _, name := range slices.Concat(own.List(), k.list(folder)) {
				all[name] = true
			}
			return slices.Sorted(maps.Keys(all))
		},
		Node: func(name string) ctltree.Node {
			node := own.Lookup(name)
			if dir, ok := node.(ctltree.Dir); ok {
				return k.merged(path.Join(folder, name), path.Join(place, name), dir)
			}
			if node != nil || strings.ContainsRune(name, '/') {
				return node
			}
			if !k.exists(path.Join(folder, name)) {
				return nil
			}
			return ctltree.Link(path.Join(place, name))
		},
	}
}
