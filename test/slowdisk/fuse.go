package slowdisk

import (
	"context"
	"syscall"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

const fileName = "disk"

// root is the mount's only directory.
type root struct {
	fs.Inode
	disk *Disk
}

var _ fs.NodeOnAdder = (*root)(nil)

func (r *root) OnAdd(ctx context.Context) {
	child := r.NewPersistentInode(ctx, &file{disk: r.disk}, fs.StableAttr{Mode: syscall.S_IFREG, Ino: 2})
	r.AddChild(fileName, child, false)
}

// file is the disk as a regular file. Opened with O_DIRECT its I/O bypasses
// the page cache and runs in parallel, else it goes through the cache.
type file struct {
	fs.Inode
	disk *Disk
}

var (
	_ fs.NodeOpener    = (*file)(nil)
	_ fs.NodeGetattrer = (*file)(nil)
	_ fs.NodeReader    = (*file)(nil)
	_ fs.NodeWriter    = (*file)(nil)
	_ fs.NodeFsyncer   = (*file)(nil)
	_ fs.NodeAllocater = (*file)(nil)
)

func (f *file) Open(_ context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if flags&syscall.O_DIRECT != 0 {
		return nil, fuse.FOPEN_DIRECT_IO | fuse.FOPEN_PARALLEL_DIRECT_WRITES, 0
	}
	return nil, 0, 0
}

func (f *file) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	out.Mode = 0o600
	out.Size = uint64(len(f.disk.data))
	out.Blksize = 4096
	return 0
}

func (f *file) Read(_ context.Context, _ fs.FileHandle, dst []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	n, errno := f.disk.fetch(dst, off)
	if errno != 0 {
		return nil, errno
	}
	return fuse.ReadResultData(dst[:n]), 0
}

func (f *file) Write(_ context.Context, _ fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	if len(data) == 0 {
		return 0, 0
	}
	if errno := f.disk.apply(data, off); errno != 0 {
		return 0, errno
	}
	return uint32(len(data)), 0
}

func (f *file) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	f.disk.noteSync()
	return 0
}

func (f *file) Allocate(_ context.Context, _ fs.FileHandle, off, size uint64, mode uint32) syscall.Errno {
	const punch, zeroRange = 0x2, 0x10 // FALLOC_FL_*
	if mode&(punch|zeroRange) == 0 {
		return syscall.EOPNOTSUPP
	}
	return f.disk.zero(off, size)
}
