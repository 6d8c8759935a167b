package volume

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const mib = 1 << 20

func TestNames(t *testing.T) {
	for _, good := range []string{"a", "disk.img", "pvc-0b8e6a3e-8f0e", "A_1:+2", strings.Repeat("x", MaxName)} {
		if err := CheckName(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for _, bad := range []string{"", ".hidden", "-x", "a/b", "a b", "a..b", "a@b", "ä", "a\x00", "a\n", "a%2f", "*", strings.Repeat("x", MaxName+1), strings.Repeat("x", 300)} {
		if err := CheckName(bad); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%q: %v, want EINVAL", bad, err)
		}
	}
	if _, err := ParseName("a@"); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a snapshot without a name: %v", err)
	}
}

func TestVolumesAreMadeOnce(t *testing.T) {
	p, _ := made(t)
	v := must(p.Create(t.Context(), "a", CreateOptions{Size: mib, Owner: "me", Private: true}))(t)
	if v.Size != mib || v.Allocated > 64<<10 || v.Owner != "me" || !v.Private || v.Created.IsZero() {
		t.Errorf("%+v", v)
	}
	again := must(p.Create(t.Context(), "a", CreateOptions{Size: mib}))(t)
	if again.ID != v.ID || again.Owner != "me" {
		t.Errorf("the second call returns %+v", again)
	}
	if _, err := p.Create(t.Context(), "a", CreateOptions{Size: 2 * mib}); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("another size: %v", err)
	}
	for _, size := range []uint64{0, 511, 1 << 63} {
		if _, err := p.Create(t.Context(), "b", CreateOptions{Size: size}); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	if temporaries(t, p) != 0 {
		t.Error("temporary files are left")
	}
}

// TestOneOfManyMakes has the same request come many times at once.
func TestOneOfManyMakes(t *testing.T) {
	p, _ := made(t)
	other := newPool(t, p.cfg.Path, &fakeUsers{}) // as of another process
	ids := make([]ID, 16)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			v, err := []*Pool{p, other}[i%2].Create(t.Context(), "a", CreateOptions{Size: mib})
			if err != nil {
				t.Error(err)
			}
			ids[i] = v.ID
		})
	}
	wg.Wait()
	if other := slices.IndexFunc(ids, func(id ID) bool { return id != ids[0] }); other >= 0 {
		t.Errorf("several volumes were made: %v", ids)
	}
}

func TestDeleteAndResize(t *testing.T) {
	p, users := made(t)
	v := must(p.Create(t.Context(), "a", CreateOptions{Size: mib}))(t)
	users.use(v.ID, Uses{Readers: 1})
	if err := p.Delete(t.Context(), v.Name, false); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("delete while open: %v", err)
	}
	if _, err := p.Resize(t.Context(), "a", mib/2, true); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("shrink while open: %v", err)
	}
	if v = must(p.Resize(t.Context(), "a", 2*mib, false))(t); v.Size != 2*mib || !slices.Contains(users.resized, v.ID) {
		t.Errorf("grown to %d bytes, clients told: %v", v.Size, users.resized)
	}
	users.use(v.ID, Uses{})
	if _, err := p.Resize(t.Context(), "a", mib, false); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("shrink by accident: %v", err)
	}
	if v = must(p.Resize(t.Context(), "a", mib, true))(t); v.Size != mib {
		t.Errorf("shrunk to %d bytes", v.Size)
	}
	for range 2 { // the second call finds nothing
		if err := p.Delete(t.Context(), v.Name, false); err != nil {
			t.Error(err)
		}
	}
	if _, err := p.Resize(t.Context(), "a", mib, false); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("resize of nothing: %v", err)
	}
}

func TestPoolsKnowTheirFolder(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pool")
	p := newPool(t, path, &fakeUsers{})
	stale := func(what string) {
		t.Helper()
		if _, err := p.List(t.Context()); !errors.Is(err, syscall.ESTALE) {
			t.Errorf("list, %s: %v, want ESTALE", what, err)
		}
		if err := p.Delete(t.Context(), Name{Volume: "a"}, false); !errors.Is(err, syscall.ESTALE) {
			t.Errorf("delete, %s: %v, want ESTALE", what, err)
		}
	}
	stale("folder missing")
	if err := p.Init(t.Context()); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("init of a folder that is missing: %v", err)
	}
	mkdir := func(path string) {
		if err := os.Mkdir(path, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	mkdir(path)
	stale("folder empty")
	for range 2 {
		if err := p.Init(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	must(p.Create(t.Context(), "a", CreateOptions{Size: mib}))(t)
	if err := os.Rename(path, filepath.Join(dir, "first")); err != nil {
		t.Fatal(err)
	}
	stale("folder gone")
	mkdir(path)
	stale("another folder in its place")
	if err := newPool(t, path, &fakeUsers{}).Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	stale("another pool of that name in its place")
	other, err := New(Config{Name: "slow", Kind: KindFiles, Path: path}, &fakeUsers{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.List(t.Context()); !errors.Is(err, syscall.ESTALE) {
		t.Errorf("a pool of another name: %v", err)
	}
	if err := other.Init(t.Context()); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("init over another pool: %v", err)
	}
}

func TestSnapshotsAndClones(t *testing.T) {
	p, users := made(t)
	v := must(p.Create(t.Context(), "a", CreateOptions{Size: 4 * mib, Private: true}))(t)
	data := bytes.Repeat([]byte("0123456789abcdef"), 4096)
	write := func(name string, off int64, data []byte) {
		t.Helper()
		f := must(os.OpenFile(filepath.Join(p.cfg.Path, name), os.O_RDWR, 0))(t)
		defer f.Close()
		must(f.WriteAt(data, off))(t)
	}
	read := func(name string) []byte {
		t.Helper()
		return must(os.ReadFile(filepath.Join(p.cfg.Path, name)))(t)
	}
	write("a", mib, data)
	before := read("a")
	s := must(p.Snapshot(t.Context(), "a", "one", "me"))(t)
	if s.Source != "a" || !s.Private || s.Owner != "me" || s.Size != v.Size || s.Allocated > mib {
		t.Errorf("snapshot %+v", s)
	}
	t.Logf("copied by %s", s.Copied)
	write("a", 0, data)
	if !bytes.Equal(read("a@one"), before) {
		t.Error("the snapshot differs from the volume")
	}
	if again := must(p.Snapshot(t.Context(), "a", "one", ""))(t); again.ID != s.ID {
		t.Error("the second call makes another snapshot")
	}
	c := must(p.Clone(t.Context(), s.Name, "b", CreateOptions{Size: 5 * mib}))(t)
	if got := read("b"); c.Source != "a@one" || c.Size != 5*mib || !bytes.Equal(got[:4*mib], before) || !bytes.Equal(got[4*mib:], make([]byte, mib)) {
		t.Errorf("clone %+v", c)
	}
	for _, o := range []CreateOptions{{Size: mib}, {Size: 511}} {
		if _, err := p.Clone(t.Context(), s.Name, "c", o); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("clone of %d bytes: %v", o.Size, err)
		}
	}
	if _, err := p.Clone(t.Context(), v.Name, "b", CreateOptions{}); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("clone of another source: %v", err)
	}
	if _, err := p.Snapshot(t.Context(), "none", "one", ""); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("snapshot of nothing: %v", err)
	}
	if err := p.Delete(t.Context(), v.Name, false); !errors.Is(err, syscall.ENOTEMPTY) {
		t.Errorf("delete of a volume with a snapshot: %v", err)
	}
	if s.Copied == SparseCopy {
		users.use(v.ID, Uses{Writers: 1})
		if _, err := p.Snapshot(t.Context(), "a", "two", ""); !errors.Is(err, syscall.EBUSY) {
			t.Errorf("snapshot without reflinks of a volume that is open: %v", err)
		}
		users.use(v.ID, Uses{})
	}
	for _, n := range []Name{s.Name, v.Name, c.Name} {
		if err := p.Delete(t.Context(), n, false); err != nil {
			t.Error(err)
		}
	}
}

func TestPublish(t *testing.T) {
	p, _ := made(t)
	v := must(p.Create(t.Context(), "a", CreateOptions{Size: mib}))(t)
	for range 2 {
		v = must(p.Publish(t.Context(), v.Name, "spiffe://x/node1", "rw"))(t)
	}
	if !v.Private || v.Grants["spiffe://x/node1"] != "rw" {
		t.Errorf("%+v", v)
	}
	if _, err := p.Publish(t.Context(), v.Name, "spiffe://x/node1", "ro"); !errors.Is(err, syscall.EEXIST) {
		t.Errorf("another access: %v", err)
	}
	busy := errors.New("it is not closed")
	if err := p.Unpublish(t.Context(), v.Name, "spiffe://x/node1", func(ID) error { return busy }); !errors.Is(err, busy) {
		t.Errorf("unpublish that does not close: %v", err)
	}
	f := must(p.Open(v.Name))(t)
	defer f.Close()
	if m := must(ReadMeta(f))(t); len(m.Grants) != 0 || !m.Private {
		t.Errorf("the door is open until the client has closed: %+v", m)
	}
	closed := 0
	for _, n := range []Name{v.Name, {Volume: "none"}} {
		if err := p.Unpublish(t.Context(), n, "spiffe://x/node1", func(ID) error { closed++; return nil }); err != nil {
			t.Error(err)
		}
	}
	if closed != 1 {
		t.Errorf("%d volumes were closed", closed)
	}
	var err error
	for i := 0; err == nil && i < 1000; i++ {
		_, err = p.Publish(t.Context(), v.Name, fmt.Sprintf("spiffe://example.org/node/%d", i), "ro")
	}
	if !errors.Is(err, syscall.E2BIG) {
		t.Errorf("publishing to many: %v", err)
	}
	must(p.Show(t.Context(), v.Name))(t)
}

// TestErrorsOfTheFileSystem uses one that is read-only, and one that is full.
func TestErrorsOfTheFileSystem(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("mounts need root")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=1m,nr_inodes=6"); err != nil {
		t.Skip("mount: ", err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	p := newPool(t, dir, &fakeUsers{})
	if err := p.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	var err error
	made := 0
	for err == nil {
		if _, err = p.Create(t.Context(), fmt.Sprint("v", made), CreateOptions{Size: mib}); err == nil {
			made++
		}
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("create in a pool that is full: %v", err)
	}
	if list := must(p.List(t.Context()))(t); len(list) != made || made == 0 {
		t.Errorf("%d volumes, %d were made", len(list), made)
	}
	if err := unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	for what, err := range map[string]error{
		"create": second(p.Create(t.Context(), "w", CreateOptions{Size: mib})),
		"resize": second(p.Resize(t.Context(), "v0", 2*mib, false)),
		"delete": p.Delete(t.Context(), Name{Volume: "v0"}, false),
	} {
		if !errors.Is(err, syscall.EROFS) {
			t.Errorf("%s in a pool that is read-only: %v", what, err)
		}
	}
	if list := must(p.List(t.Context()))(t); len(list) != made {
		t.Errorf("%d volumes of %d are listed", len(list), made)
	}
}

func second[T any](_ T, err error) error { return err }

// TestManyVolumes has 10,000 volumes in a pool. Its bounds are ten times those that
// docs/operations.md promises of an idle host.
func TestManyVolumes(t *testing.T) {
	if testing.Short() {
		t.Skip("a test of half a minute")
	}
	p, _ := made(t)
	const volumes = 10_000
	var longest time.Duration
	start := time.Now()
	for i := range volumes {
		one := time.Now()
		must(p.Create(t.Context(), fmt.Sprintf("pvc-%05d", i), CreateOptions{Size: 1 << 30}))(t)
		longest = max(longest, time.Since(one))
	}
	t.Logf("create: %v each, the longest %v", time.Since(start)/volumes, longest)
	start = time.Now()
	if list := must(p.List(t.Context()))(t); len(list) != volumes {
		t.Errorf("%d volumes", len(list))
	}
	took := time.Since(start)
	t.Logf("list: %v", took)
	if took > 10*time.Second {
		t.Errorf("a list takes %v", took)
	}
}
