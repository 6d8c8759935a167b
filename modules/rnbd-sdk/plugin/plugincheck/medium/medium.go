package medium

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fuse"
	"golang.org/x/sys/unix"
)

// block is the unit of allocation in bytes.
const block = 4096

// Faults are how the medium misbehaves. The zero value is a good medium.
type Faults struct {
	HoldWrites bool          // writes, zeroes and syncs wait for the end of this
	HoldReads  bool          // so do reads
	Delay      time.Duration // of each write before it is applied
	Write      syscall.Errno // what writes and zeroes fail with; 0: they do not
	Read       syscall.Errno // what reads fail with
	Sync       syscall.Errno // what syncs fail with; what they cover is lost by CutPower
	Short      bool          // writes, and reads past the page cache, of more than 512 bytes transfer half, in whole sectors
}

// Medium is a disk of a fixed size. All methods may be called from any goroutine.
type Medium struct {
	dir    string
	server *fuse.Server

	mu      sync.Mutex
	changed *sync.Cond
	faults  Faults
	held    int    // requests that wait
	writes  int    // requests that wrote
	now     []byte // as reads see it
	kept    []byte // what a power cut leaves
	dirty   []bool // blocks in which now and kept may differ
	used    []bool // blocks that are allocated
}

// Mount makes a medium of size bytes, a multiple of 4096, and mounts it at the folder
// dir. It reads as zeroes, and nothing of it is allocated.
func Mount(dir string, size int) (*Medium, error) {
	n := size / block
	m := &Medium{dir: dir, now: make([]byte, size), kept: make([]byte, size), dirty: make([]bool, n), used: make([]bool, n)}
	m.changed = sync.NewCond(&m.mu)
	var err error
	m.server, err = fuse.NewServer(&files{fuse.NewDefaultRawFileSystem(), m}, dir, &fuse.MountOptions{
		DirectMount: true, FsName: "rnbd-medium", Name: "rnbd-medium",
		MaxBackground: 256, MaxWrite: 1 << 20, DisableXAttrs: true,
		ExtraCapabilities: fuse.CAP_ASYNC_DIO, // without it io_uring has one request on the way
	})
	if err != nil {
		return nil, fmt.Errorf("mount a medium at %s: %w", dir, err)
	}
	go m.server.Serve()
	if err := errors.Join(m.server.WaitMount(), keepFromChildren()); err != nil {
		return nil, errors.Join(fmt.Errorf("mount a medium at %s: %w", dir, err), m.Close())
	}
	return m, nil
}

// Path is the file.
func (m *Medium) Path() string { return filepath.Join(m.dir, FileName) }

// Size returns the bytes of the medium.
func (m *Medium) Size() uint64 { return uint64(len(m.now)) }

// Close ends all faults and unmounts. Users that are left lose the medium.
func (m *Medium) Close() error {
	m.Release()
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := m.server.Unmount()
		if err == nil {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.Join(fmt.Errorf("the medium at %s is still in use: %w", m.dir, err), unix.Unmount(m.dir, unix.MNT_DETACH))
		}
	}
}

// Set changes the faults for requests that are not applied yet.
func (m *Medium) Set(f Faults) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.faults = f
	m.changed.Broadcast()
}

// Release ends all faults.
func (m *Medium) Release() { m.Set(Faults{}) }

// Held returns the number of requests that wait.
func (m *Medium) Held() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.held
}

// Writes returns the number of writes and zeroes that have arrived.
func (m *Medium) Writes() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.writes
}

// CutPower forgets what was written and not synced.
func (m *Medium) CutPower() {
	m.mu.Lock()
	defer m.mu.Unlock()
	copy(m.now, m.kept)
	clear(m.dirty)
}

// Kept returns a copy of n bytes at off as a power cut would leave them.
func (m *Medium) Kept(off uint64, n int) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]byte(nil), m.kept[off:][:n]...)
}

// Bytes returns a copy of n bytes at off as reads see them.
func (m *Medium) Bytes(off uint64, n int) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]byte(nil), m.now[off:][:n]...)
}

// Allocated reports whether all of n bytes at off are allocated.
func (m *Medium) Allocated(off, n uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for b := off / block; b*block < off+n; b++ {
		if !m.used[b] {
			return false
		}
	}
	return true
}

func (m *Medium) allocated() (bytes uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, u := range m.used {
		if u {
			bytes += block
		}
	}
	return bytes
}

// wait waits while hold says so. It is called, and returns, with mu held.
func (m *Medium) wait(hold func() bool) {
	m.held++
	for hold() {
		m.changed.Wait()
	}
	m.held--
}

func (m *Medium) write(data []byte, off uint64, durable bool) (int, syscall.Errno) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if off > m.Size() || uint64(len(data)) > m.Size()-off {
		return 0, syscall.ENOSPC
	}
	m.arrive()
	if m.faults.Write != 0 {
		return 0, m.faults.Write
	}
	data = data[:m.transferred(len(data))]
	copy(m.now[off:], data)
	m.mark(off, uint64(len(data)), true)
	if durable {
		if m.faults.Sync != 0 {
			return 0, m.faults.Sync
		}
		copy(m.kept[off:], data)
	}
	return len(data), 0
}

// arrive counts a write and waits as the faults say. mu is held.
func (m *Medium) arrive() {
	m.writes++
	if d := m.faults.Delay; d > 0 {
		m.mu.Unlock()
		time.Sleep(d)
		m.mu.Lock()
	}
	m.wait(func() bool { return m.faults.HoldWrites })
}

// transferred is how many of n bytes a request moves.
func (m *Medium) transferred(n int) int {
	if m.faults.Short && n > 512 {
		n = (n/2 + 511) &^ 511
	}
	return n
}

// mark notes that blocks differ from what is kept, and whether they are allocated.
// Holes are made of whole blocks.
func (m *Medium) mark(off, n uint64, used bool) {
	for b := off / block; b*block < off+n; b++ {
		m.dirty[b] = true
		if used || b*block >= off && (b+1)*block <= off+n {
			m.used[b] = used
		}
	}
}

// read reads for a descriptor; the page cache takes a short read for the end of the file.
func (m *Medium) read(dst []byte, off uint64, direct bool) (int, syscall.Errno) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wait(func() bool { return m.faults.HoldReads })
	switch {
	case m.faults.Read != 0:
		return 0, m.faults.Read
	case off >= m.Size():
		return 0, 0
	}
	n := min(len(dst), int(m.Size()-off))
	if direct {
		n = m.transferred(n)
	}
	return copy(dst[:n], m.now[off:]), 0
}

func (m *Medium) sync() syscall.Errno {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.wait(func() bool { return m.faults.HoldWrites })
	if m.faults.Sync != 0 {
		return m.faults.Sync
	}
	for b, d := range m.dirty {
		if d {
			copy(m.kept[b*block:][:block], m.now[b*block:])
			m.dirty[b] = false
		}
	}
	return 0
}

func (m *Medium) zero(off, n uint64, used bool) syscall.Errno {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.arrive()
	if m.faults.Write != 0 {
		return m.faults.Write
	}
	clear(m.now[off:][:n])
	m.mark(off, n, used)
	return 0
}

func (m *Medium) allocate(off, n uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for b := off / block; b*block < off+n; b++ {
		m.used[b] = true
	}
}

// seek is lseek for data and holes.
func (m *Medium) seek(off uint64, whence uint32) (uint64, syscall.Errno) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if off >= m.Size() {
		return 0, syscall.ENXIO
	}
	for b := off / block; b < uint64(len(m.used)); b++ {
		if m.used[b] == (whence == unix.SEEK_DATA) {
			return max(off, b*block), 0
		}
	}
	if whence == unix.SEEK_DATA {
		return 0, syscall.ENXIO
	}
	return m.Size(), 0
}

// Available returns why a medium cannot be mounted here; nil if it can.
func Available() error {
	f, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	_ = f.Close()
	if os.Geteuid() != 0 {
		return fmt.Errorf("only root mounts: %w", syscall.EPERM)
	}
	return nil
}

// Faults returns the faults that hold.
func (m *Medium) Faults() Faults {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.faults
}
