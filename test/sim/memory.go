package sim

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// memories are the arenas that daemons have shown to storage plugins, by file.
// Each has a mapping of its own for the lifetime of the world: data that a
// kernel writes for a dead process goes to pages, wherever they are mapped.
type memories struct {
	w  *world
	mu sync.Mutex
	by map[uint64]*region // by inode
}

// region is the memory of one arena.
type region struct {
	w     *world
	arena *shm.Arena
	bytes []byte

	mu    sync.Mutex
	owned map[*operation]bool
}

// of returns the region of an arena.
func (m *memories) of(a *shm.Arena) (*region, error) {
	var st unix.Stat_t
	if err := unix.Fstat(a.FD(), &st); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if r := m.by[st.Ino]; r != nil {
		return r, nil
	}
	fd, err := unix.FcntlInt(uintptr(a.FD()), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	own, err := shm.OpenArena(fd, a.Size())
	if err != nil {
		return nil, err
	}
	r := &region{w: m.w, arena: own, bytes: own.Bytes(), owned: map[*operation]bool{}}
	m.by[st.Ino] = r
	return r, nil
}

func (m *memories) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, r := range m.by {
		_ = r.arena.Close()
	}
}

// claim gives the memory of o to it. Nobody else may have a byte of it.
func (r *region) claim(o *operation) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for other := range r.owned {
		if o.r.BufOff < other.r.BufOff+uint64(other.r.Len) && other.r.BufOff < o.r.BufOff+uint64(o.r.Len) {
			r.w.violate("memory: %s is given to %s while %s uses it", extent(o), o, other)
		}
	}
	r.owned[o] = true
}

func (r *region) giveUp(o *operation) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.owned, o)
}

func extent(o *operation) string { return fmt.Sprintf("[%d,+%d)", o.r.BufOff, o.r.Len) }

func (o *operation) String() string {
	return fmt.Sprintf("%s of %s at %d by process %d", o.r.Op, o.d.name, o.r.Off, o.p.number)
}
