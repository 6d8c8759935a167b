package shm

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// memfd makes a memory file with the given content, size and seals.
func memfd(t testing.TB, content []byte, size int64, seal int) int {
	t.Helper()
	fd := must(unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING))
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if len(content) > 0 {
		must(unix.Pwrite(fd, content, 0))
	}
	must(unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seal))
	return fd
}

func TestArena_SharedByDescriptor(t *testing.T) {
	a := must(NewArena("t", 3*4096))
	defer a.Close()
	b := must(OpenArena(dup(t, a.FD()), a.Size()))
	defer b.Close()
	copy(a.Bytes()[5000:], "payload")
	if got := string(b.Bytes()[5000:5007]); got != "payload" {
		t.Errorf("peer reads %q", got)
	}
}

func TestArena_CannotBeShrunkByPeer(t *testing.T) {
	a := must(NewArena("t", 8192))
	defer a.Close()
	for _, size := range []int64{0, 4096, 1 << 20} {
		if err := unix.Ftruncate(a.FD(), size); err != unix.EPERM {
			t.Errorf("truncate to %d: %v, want EPERM", size, err)
		}
	}
	a.Bytes()[8191] = 1
}

func TestArena_NameMayBeLong(t *testing.T) {
	a, err := NewArena(strings.Repeat("dev/", 500), 4096)
	if err != nil {
		t.Fatal(err)
	}
	a.Close()
}

func TestOpenArena_Refuses(t *testing.T) {
	pipe := func(t *testing.T) int {
		var p [2]int
		if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(p[1]) })
		return p[0]
	}
	tests := []struct {
		name string
		fd   func(t *testing.T) int
		size int
		want string
	}{
		{"no seals", func(t *testing.T) int { return memfd(t, nil, 8192, 0) }, 8192, "seals"},
		{"may shrink", func(t *testing.T) int { return memfd(t, nil, 8192, unix.F_SEAL_GROW|unix.F_SEAL_SEAL) }, 8192, "seals"},
		{"more seals may be added", func(t *testing.T) int { return memfd(t, nil, 8192, unix.F_SEAL_GROW|unix.F_SEAL_SHRINK) }, 8192, "seals"},
		{"too short", func(t *testing.T) int { return memfd(t, nil, 4096, seals) }, 8192, "has 4096 bytes, want 8192"},
		{"size zero", func(t *testing.T) int { return memfd(t, nil, 4096, seals) }, 0, "want 0"},
		{"size negative", func(t *testing.T) int { return memfd(t, nil, 4096, seals) }, -1, "want -1"},
		{"no memory file", pipe, 4096, "seals"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			fd := tt.fd(t)
			a, err := OpenArena(fd, tt.size)
			if err == nil || a != nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("OpenArena = %v, %v; want an error with %q", a, err, tt.want)
			}
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != unix.EBADF {
				t.Errorf("descriptor is still open after the refusal")
			}
		})
	}
}

func TestRing_EntriesArePowersOfTwo(t *testing.T) {
	for n, ok := range map[int]bool{1: true, 2: true, 1024: true, MaxEntries: true,
		0: false, -1: false, -1 << 63: false, 3: false, 1000: false, MaxEntries * 2: false} {
		r, err := NewHeapRing(n)
		if (err == nil) != ok {
			t.Errorf("%d entries: %v", n, err)
		}
		if r != nil {
			r.Close()
		}
	}
}

func TestOpenRing_Refuses(t *testing.T) {
	good := func() []byte {
		mem := heapMemory(headerSize)
		writeGeometry(mem, geometryOf(8))
		return mem
	}
	bend := func(change func(h *geometry)) []byte {
		mem := good()
		g := geometryIn(mem)
		change(&g)
		writeGeometry(mem, g)
		return mem
	}
	size := int64(ringSize(8))
	tests := []struct {
		name    string
		content []byte
		size    int64
		seals   int
		want    string
	}{
		{"no seals", good(), size, 0, "seals"},
		{"empty", nil, 0, seals, "file of 0 bytes"},
		{"shorter than the header", good()[:100], 100, seals, "file of 100 bytes"},
		{"shorter than its entries", good(), size - 1, seals, "need"},
		{"absurdly large", good(), 1 << 40, seals, "file of"},
		{"all zero", nil, size, seals, "magic"},
		{"magic of something else", bend(func(g *geometry) { g.magic++ }), size, seals, "magic"},
		{"version of the future", bend(func(g *geometry) { g.version = 2 }), size, seals, "version 2, this side speaks 1"},
		{"unknown feature", bend(func(g *geometry) { g.features = 0x10 }), size, seals, "feature bits 0x10"},
		{"entries no power of two", bend(func(g *geometry) { g.entries = 7 }), size, seals, "power of two"},
		{"entries zero", bend(func(g *geometry) { g.entries = 0 }), size, seals, "power of two"},
		{"entries huge", bend(func(g *geometry) { g.entries = 1 << 31 }), size, seals, "power of two"},
		{"entries more than the file", bend(func(g *geometry) { *g = geometryOf(16) }), size, seals, "need"},
		{"larger requests", bend(func(g *geometry) { g.sqeSize = 128 }), size, seals, "entries of 128"},
		{"larger answers", bend(func(g *geometry) { g.cqeSize = 32 }), size, seals, "and 32 bytes"},
		{"requests elsewhere", bend(func(g *geometry) { g.sqOff = 1 << 30 }), size, seals, "at 1073741824"},
		{"answers elsewhere", bend(func(g *geometry) { g.cqOff = 0 }), size, seals, "and 0,"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			fds := []int{memfd(t, tt.content, tt.size, tt.seals), must(newEvent()), must(newEvent())}
			r, err := OpenRing(fds[0], fds[1], fds[2])
			if err == nil || r != nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("OpenRing = %v, %v; want an error with %q", r, err, tt.want)
			}
			for _, fd := range fds {
				if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != unix.EBADF {
					t.Errorf("descriptor %d is still open after the refusal", fd)
				}
			}
		})
	}
}

// A ring that the check accepts fits its file and works.
func FuzzGeometry(f *testing.F) {
	g := geometryOf(8)
	f.Add(g.magic, g.version, g.features, g.entries, g.sqeSize, g.cqeSize, g.sqOff, g.cqOff, int64(ringSize(8)))
	f.Add(g.magic, g.version, g.features, uint32(1<<31), g.sqeSize, g.cqeSize, g.sqOff, g.cqOff, int64(1<<40))
	f.Add(g.magic, g.version, g.features, uint32(0), uint32(0), uint32(0), uint32(0), uint32(0), int64(0))
	f.Fuzz(func(t *testing.T, magic uint64, version, features, entries, sqe, cqe, sqOff, cqOff uint32, size int64) {
		g := geometry{magic, version, features, entries, sqe, cqe, sqOff, cqOff}
		err := g.check(size)
		if err != nil {
			if !errors.Is(err, ErrLayout) {
				t.Fatalf("error of another kind: %v", err)
			}
			return
		}
		if int64(cqOff)+int64(entries)*int64(cqe) > size || g != geometryOf(int(entries)) {
			t.Fatalf("accepted %+v in a file of %d bytes", g, size)
		}
		if entries > 1024 {
			return
		}
		mem := heapMemory(int(min(size, int64(ringSize(MaxEntries)))))
		writeGeometry(mem, g)
		v := viewOf(mem, int(geometryIn(mem).entries))
		v.sqes[entries-1].Tag, v.cqes[entries-1].Tag = 1, 2
		if mem[sqOff+entries*sqeSize-sqeSize] == mem[cqOff+entries*cqeSize-cqeSize] {
			t.Fatal("entries overlap")
		}
	})
}
