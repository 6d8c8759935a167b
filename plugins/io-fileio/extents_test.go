package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/extents"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin/plugintest"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

func data(n uint64) extents.Extent { return extents.Extent{Len: n} }
func hole(n uint64) extents.Extent { return extents.Extent{Len: n, Hole: true} }

// part is where data are written.
type part struct{ off, n uint64 }

// sparse makes a file of size bytes with data in those parts.
func sparse(t *testing.T, dir string, size int64, parts ...part) string {
	t.Helper()
	path := file(t, dir, size)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range parts {
		b := make([]byte, p.n)
		for i := range b {
			b[i] = 'x'
		}
		if _, err := f.WriteAt(b, int64(p.off)); err != nil {
			t.Fatal(err)
		}
	}
	return path
}

func TestExtents(t *testing.T) {
	const k, m = 1 << 10, 1 << 20
	for kind, dir := range map[string]func(*testing.T) string{
		"the file system of the test": func(t *testing.T) string { return t.TempDir() },
		"tmpfs":                       func(t *testing.T) string { return tmpfs(t, "16M") },
		"ext4":                        func(t *testing.T) string { return mounted(t, "ext4") },
		"xfs":                         func(t *testing.T) string { return mounted(t, "xfs") },
	} {
		t.Run(kind, func(t *testing.T) {
			root := dir(t)
			for i, c := range []struct {
				name   string
				size   int64
				parts  []part
				off, n uint64
				want   []extents.Extent
			}{
				{"a hole at the beginning", m, []part{{512 * k, 512 * k}}, 0, m, []extents.Extent{hole(512 * k), data(512 * k)}},
				{"in the middle", m, []part{{0, 64 * k}, {960 * k, 64 * k}}, 0, m, []extents.Extent{data(64 * k), hole(896 * k), data(64 * k)}},
				{"at the end", m, []part{{0, 64 * k}}, 0, m, []extents.Extent{data(64 * k), hole(960 * k)}},
				{"only a hole", m, nil, 0, m, []extents.Extent{hole(m)}},
				{"only data", m, []part{{0, m}}, 0, m, []extents.Extent{data(m)}},
				{"a part of a hole", m, []part{{0, 64 * k}}, 128 * k, 512, []extents.Extent{hole(512)}},
				{"a part of the data", m, []part{{0, 64 * k}}, 512, 1024, []extents.Extent{data(1024)}},
				{"from within data to within a hole", m, []part{{0, 64 * k}}, 32 * k, 64 * k, []extents.Extent{data(32 * k), hole(32 * k)}},
				{"the end of the file is no whole block", m + 100, []part{{m, 100}}, 0, m, []extents.Extent{hole(m)}},
			} {
				t.Run(c.name, func(t *testing.T) {
					dir := fmt.Sprintf("%s/%d", root, i)
					if err := os.Mkdir(dir, 0o700); err != nil {
						t.Fatal(err)
					}
					d := open(t, request(t, sparse(t, dir, c.size, c.parts...), blk.ReadOnly))
					if got, err := d.Extents(t.Context(), c.off, c.n); err != nil || !slices.Equal(got, c.want) {
						t.Errorf("%v, error %v, want %v", got, err, c.want)
					}
				})
			}
		})
	}
}

func TestExtents_MoreThanAListHas(t *testing.T) {
	const piece, pieces = 64 << 10, 2*extents.Max + 20
	var parts []part
	for i := uint64(0); i < pieces; i += 2 {
		parts = append(parts, part{i * piece, piece})
	}
	d := open(t, request(t, sparse(t, t.TempDir(), pieces*piece, parts...), blk.ReadWrite))
	var off uint64
	for i := uint64(0); off < pieces*piece; {
		list, err := d.Extents(t.Context(), off, pieces*piece-off)
		if err != nil || len(list) == 0 || len(list) > extents.Max {
			t.Fatalf("%d ranges, error %v", len(list), err)
		}
		for _, e := range list {
			if e.Len != piece || e.Hole != (i%2 == 1) {
				t.Fatalf("range %d: %+v", i, e)
			}
			off, i = off+e.Len, i+1
		}
	}
}

func TestExtents_ADiscardMakesAHole(t *testing.T) {
	h := plugintest.StartIO(t, &fileBackend{}, plugintest.Options{Path: file(t, t.TempDir(), 4<<20)})
	check := func(want ...extents.Extent) {
		t.Helper()
		if got, err := h.Process.Extents(t.Context(), plugintest.Device, 0, 4<<20); err != nil || !slices.Equal(got, want) {
			t.Errorf("%v, error %v, want %v", got, err, want)
		}
	}
	check(hole(4 << 20))
	for i := range h.Memory.Bytes() {
		h.Memory.Bytes()[i] = 'x'
	}
	if e := h.Do(shm.SQE{Op: blk.Write, Len: 3 << 20}); e != blk.OK {
		t.Fatal(e)
	}
	check(data(3<<20), hole(1<<20))
	if e := h.Do(shm.SQE{Op: blk.Discard, Offset: 1 << 20, Len: 1 << 20}); e != blk.OK {
		t.Fatal(e)
	}
	check(data(1<<20), hole(1<<20), data(1<<20), hole(1<<20))
}

func TestExtents_OfABlockDevice(t *testing.T) {
	d := open(t, request(t, loopDevice(t), blk.ReadOnly))
	if list, err := d.Extents(t.Context(), 0, 4096); blk.ToErrno(err) != blk.EOPNOTSUPP {
		t.Errorf("%v, error %v, want EOPNOTSUPP", list, err)
	}
}

func TestExtents_AFileCutBehindOurBack(t *testing.T) {
	path := sparse(t, t.TempDir(), 1<<20, part{0, 64 << 10})
	d := open(t, request(t, path, blk.ReadOnly))
	if err := os.Truncate(path, 256<<10); err != nil {
		t.Fatal(err)
	}
	want := []extents.Extent{data(64 << 10), hole(192 << 10), data(768 << 10)}
	if got, err := d.Extents(t.Context(), 0, 1<<20); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, error %v, want %v: no hole where reads fail", got, err, want)
	}
	if got, err := d.Extents(t.Context(), 512<<10, 4096); err != nil || !slices.Equal(got, []extents.Extent{data(4096)}) {
		t.Errorf("behind the end: %v, error %v", got, err)
	}
}

// seekIn is lseek in a file of the given size with data in parts, in ascending order.
func seekIn(size uint64, parts ...part) seekFunc {
	return func(at uint64, whence int) (uint64, error) {
		switch {
		case whence == unix.SEEK_END:
			return size, nil
		case at >= size:
			return 0, unix.ENXIO
		}
		for _, p := range parts {
			switch {
			case at >= p.off+p.n:
			case whence == unix.SEEK_DATA:
				return max(at, p.off), nil
			case at < p.off:
				return at, nil
			default:
				at = p.off + p.n
			}
		}
		if whence == unix.SEEK_DATA {
			return 0, unix.ENXIO
		}
		return min(at, size), nil
	}
}

func TestMapFile_BlocksWithAnyDataAreData(t *testing.T) {
	for _, c := range []struct {
		name   string
		parts  []part
		off, n uint64
		want   []extents.Extent
	}{
		{"one byte", []part{{5000, 1}}, 0, 16384, []extents.Extent{hole(4096), data(4096), hole(8192)}},
		{"across two blocks", []part{{8191, 2}}, 0, 16384, []extents.Extent{hole(4096), data(8192), hole(4096)}},
		{"no hole between two in neighbours", []part{{4000, 10}, {5000, 10}}, 0, 16384, []extents.Extent{data(8192), hole(8192)}},
		{"of a range that begins within a block", []part{{4100, 10}}, 4608, 3584, []extents.Extent{hole(3584)}},
		{"of a range that ends within a block", []part{{4100, 10}}, 0, 4608, []extents.Extent{hole(4096), data(512)}},
	} {
		if got, err := mapFile(t.Context(), seekIn(16384, c.parts...), c.off, c.n, 4096); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, error %v, want %v", c.name, got, err, c.want)
		}
	}
}

func TestMapFile_Errors(t *testing.T) {
	all := []extents.Extent{data(8192)}
	for _, errno := range []unix.Errno{unix.EINVAL, unix.EOPNOTSUPP, unix.ENOSYS} {
		refuse := func(uint64, int) (uint64, error) { return 0, errno }
		if got, err := mapFile(t.Context(), refuse, 4096, 8192, 512); err != nil || !slices.Equal(got, all) {
			t.Errorf("%v: %v, error %v, want all data", errno, got, err)
		}
	}
	for _, whence := range []int{unix.SEEK_DATA, unix.SEEK_HOLE, unix.SEEK_END} {
		fail := func(at uint64, w int) (uint64, error) {
			if w == whence {
				return 0, unix.EIO
			}
			return seekIn(16384, part{0, 512})(at, w)
		}
		if got, err := mapFile(t.Context(), fail, 0, 8192, 512); blk.ToErrno(err) != blk.EIO {
			t.Errorf("seek %d fails: %v, error %v, want EIO", whence, got, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := mapFile(ctx, seekIn(16384), 0, 8192, 512); err == nil {
		t.Errorf("after its end: %v", got)
	}
	same := func(at uint64, _ int) (uint64, error) { return at, nil } // data that go while they are looked for
	if got, err := mapFile(t.Context(), same, 0, 8192, 512); err != nil || !slices.Equal(got, all) {
		t.Errorf("%v, error %v, want all data", got, err)
	}
}

// Lists of files with random data are contiguous, and hold each byte of the data.
func TestMapFile_RandomFiles(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	for range 2000 {
		block := uint64(512 << r.IntN(4))
		size := block * uint64(1+r.IntN(64))
		var parts []part
		for at := uint64(0); ; {
			at += 1 + r.Uint64N(4*block)
			p := part{at, 1 + r.Uint64N(4*block)}
			if at = p.off + p.n; at > size {
				break
			}
			parts = append(parts, p)
		}
		off := 512 * r.Uint64N(size/512)
		n := 512 * (1 + r.Uint64N((size-off)/512))
		list, err := mapFile(t.Context(), seekIn(size, parts...), off, n, block)
		if err != nil {
			t.Fatal(err)
		}
		at, kind := off, false
		for i, e := range list {
			if e.Len == 0 || i > 0 && e.Hole == kind || at > off && at%block != 0 {
				t.Fatalf("seed %d: %d bytes at %d of %v: %v", seed, n, off, parts, list)
			}
			for _, p := range parts {
				if e.Hole && p.off < at+e.Len && at < p.off+p.n {
					t.Fatalf("seed %d: %v lies in a hole of %d bytes at %d", seed, p, e.Len, at)
				}
			}
			at, kind = at+e.Len, e.Hole
		}
		if at != off+n {
			t.Fatalf("seed %d: the list of %d bytes at %d ends at %d: %v", seed, n, off, at, list)
		}
	}
}
