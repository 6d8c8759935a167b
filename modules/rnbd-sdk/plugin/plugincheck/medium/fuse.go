package medium

import (
	"os"
	"strconv"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// FileName is the name of the file on the mount.
const FileName = "disk"

const fileNode = 2

// files serves the root folder with its one file. Requests of the file reach the Medium.
type files struct {
	fuse.RawFileSystem
	m *Medium
}

func (f *files) attr(node uint64, a *fuse.Attr) {
	*a = fuse.Attr{Ino: node, Mode: syscall.S_IFDIR | 0o755, Nlink: 2}
	if node == fileNode {
		*a = fuse.Attr{Ino: node, Mode: syscall.S_IFREG | 0o666, Nlink: 1, Size: f.m.Size(), Blksize: block, Blocks: f.m.allocated() / 512}
	}
	a.Uid, a.Gid = uint32(os.Getuid()), uint32(os.Getgid())
}

func (f *files) Lookup(_ <-chan struct{}, _ *fuse.InHeader, name string, out *fuse.EntryOut) fuse.Status {
	if name != FileName {
		return fuse.ENOENT
	}
	out.NodeId = fileNode
	f.attr(fileNode, &out.Attr)
	return fuse.OK
}

func (f *files) Access(<-chan struct{}, *fuse.AccessIn) fuse.Status { return fuse.OK }

func (f *files) GetAttr(_ <-chan struct{}, in *fuse.GetAttrIn, out *fuse.AttrOut) fuse.Status {
	f.attr(in.NodeId, &out.Attr)
	return fuse.OK
}

func (f *files) SetAttr(_ <-chan struct{}, in *fuse.SetAttrIn, out *fuse.AttrOut) fuse.Status {
	if in.Valid&fuse.FATTR_SIZE != 0 && in.Size != f.m.Size() {
		return fuse.EPERM
	}
	f.attr(in.NodeId, &out.Attr)
	return fuse.OK
}

// Open lets descriptors with O_DIRECT have several requests on the way. Others go
// through the page cache, which writes through.
func (f *files) Open(_ <-chan struct{}, in *fuse.OpenIn, out *fuse.OpenOut) fuse.Status {
	if in.Flags&syscall.O_DIRECT != 0 {
		out.OpenFlags = fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES
	}
	return fuse.OK
}

func (f *files) OpenDir(<-chan struct{}, *fuse.OpenIn, *fuse.OpenOut) fuse.Status { return fuse.OK }

func (f *files) ReadDir(_ <-chan struct{}, in *fuse.ReadIn, out *fuse.DirEntryList) fuse.Status {
	if in.Offset == 0 {
		out.AddDirEntry(fuse.DirEntry{Mode: syscall.S_IFREG, Name: FileName, Ino: fileNode})
	}
	return fuse.OK
}

func (f *files) Read(_ <-chan struct{}, in *fuse.ReadIn, buf []byte) (fuse.ReadResult, fuse.Status) {
	n, errno := f.m.read(buf, in.Offset, in.Flags&syscall.O_DIRECT != 0)
	return fuse.ReadResultData(buf[:n]), fuse.Status(errno)
}

func (f *files) Write(_ <-chan struct{}, in *fuse.WriteIn, data []byte) (uint32, fuse.Status) {
	n, errno := f.m.write(data, in.Offset, in.Flags&syscall.O_DSYNC != 0)
	return uint32(n), fuse.Status(errno)
}

func (f *files) Flush(<-chan struct{}, *fuse.FlushIn) fuse.Status { return fuse.OK }

func (f *files) Fsync(<-chan struct{}, *fuse.FsyncIn) fuse.Status {
	return fuse.Status(f.m.sync())
}

func (f *files) Fallocate(_ <-chan struct{}, in *fuse.FallocateIn) fuse.Status {
	switch {
	case in.Offset+in.Length > f.m.Size():
		return fuse.Status(syscall.ENOSPC)
	case in.Mode&unix.FALLOC_FL_PUNCH_HOLE != 0:
		return fuse.Status(f.m.zero(in.Offset, in.Length, false))
	case in.Mode&unix.FALLOC_FL_ZERO_RANGE != 0:
		return fuse.Status(f.m.zero(in.Offset, in.Length, true))
	}
	f.m.allocate(in.Offset, in.Length)
	return fuse.OK
}

func (f *files) Lseek(_ <-chan struct{}, in *fuse.LseekIn, out *fuse.LseekOut) fuse.Status {
	off, errno := f.m.seek(in.Offset, in.Whence)
	out.Offset = off
	return fuse.Status(errno)
}

func (f *files) StatFs(_ <-chan struct{}, _ *fuse.InHeader, out *fuse.StatfsOut) fuse.Status {
	*out = fuse.StatfsOut{Bsize: block, Blocks: f.m.Size() / block, NameLen: 255}
	return fuse.OK
}

// keepFromChildren marks this process's descriptors of /dev/fuse as not to be inherited:
// a child that had one would keep the mount alive after the end of this process, and
// would wait for it.
func keepFromChildren() error {
	const dir = "/proc/self/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if target, err := os.Readlink(dir + "/" + e.Name()); err != nil || target != "/dev/fuse" {
			continue
		}
		if fd, err := strconv.Atoi(e.Name()); err == nil {
			_, _ = unix.FcntlInt(uintptr(fd), unix.F_SETFD, unix.FD_CLOEXEC)
		}
	}
	return nil
}
