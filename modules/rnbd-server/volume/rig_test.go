package volume

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// fakeUsers has the uses of each file. The zero value has none.
type fakeUsers struct {
	mu      sync.Mutex
	uses    map[ID]Uses
	paused  int
	resized []ID
}

func (u *fakeUsers) Hold(_ context.Context, id ID) (Uses, func(), error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.uses[id], func() {}, nil
}

func (u *fakeUsers) Pause(context.Context, ID) (func() error, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.paused++
	return func() error {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.paused--
		return nil
	}, nil
}

func (u *fakeUsers) Resized(_ context.Context, id ID) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.resized = append(u.resized, id)
	return nil
}

func (u *fakeUsers) use(id ID, uses Uses) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.uses == nil {
		u.uses = map[ID]Uses{}
	}
	u.uses[id] = uses
}

// errKilled is the result of every step after the end of a simulated process.
var errKilled = errors.New("the process is dead")

// killer is a folder of a process that ends before one of its steps.
type killer struct {
	folder
	left  int // steps until the end; -1: it does not end
	steps int // steps that were done
	trace []string
}

func (k *killer) step(what string) error {
	if k.left == 0 {
		return errKilled
	}
	if k.left > 0 {
		k.left--
	}
	k.steps++
	k.trace = append(k.trace, what)
	return nil
}

func (k *killer) create(name string) (*os.File, error) {
	if err := k.step("create"); err != nil {
		return nil, err
	}
	return k.folder.create(name)
}

func (k *killer) open(name string, flags int) (*os.File, error) {
	if err := k.step("open"); err != nil {
		return nil, err
	}
	return k.folder.open(name, flags)
}

func (k *killer) names() ([]string, error) {
	if err := k.step("names"); err != nil {
		return nil, err
	}
	return k.folder.names()
}

func (k *killer) stat(name string) (unix.Stat_t, error) {
	if err := k.step("stat"); err != nil {
		return unix.Stat_t{}, err
	}
	return k.folder.stat(name)
}

func (k *killer) attr(name string) ([]byte, error) {
	if err := k.step("attr"); err != nil {
		return nil, err
	}
	return k.folder.attr(name)
}

func (k *killer) setAttr(f *os.File, value []byte) error {
	if err := k.step("setAttr"); err != nil {
		return err
	}
	return k.folder.setAttr(f, value)
}

func (k *killer) truncate(f *os.File, size int64) error {
	if err := k.step("truncate"); err != nil {
		return err
	}
	return k.folder.truncate(f, size)
}

func (k *killer) reflink(to, from *os.File) error {
	if err := k.step("reflink"); err != nil {
		return err
	}
	return k.folder.reflink(to, from)
}

func (k *killer) copyRange(to, from *os.File, off, n int64) error {
	if err := k.step("copyRange"); err != nil {
		return err
	}
	return k.folder.copyRange(to, from, off, n)
}

func (k *killer) sync(f *os.File) error {
	if err := k.step("sync"); err != nil {
		return err
	}
	return k.folder.sync(f)
}

func (k *killer) rename(from, to string) error {
	if err := k.step("rename"); err != nil {
		return err
	}
	return k.folder.rename(from, to)
}

func (k *killer) remove(name string) error {
	if err := k.step("remove"); err != nil {
		return err
	}
	return k.folder.remove(name)
}

func (k *killer) syncFolder() error {
	if err := k.step("syncFolder"); err != nil {
		return err
	}
	return k.folder.syncFolder()
}

func newPool(t *testing.T, path string, users Users) *Pool {
	t.Helper()
	p, err := New(Config{Name: "fast", Kind: KindFiles, Path: path}, users)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// made returns a pool that Init has made.
func made(t *testing.T) (*Pool, *fakeUsers) {
	t.Helper()
	users := &fakeUsers{}
	p := newPool(t, t.TempDir(), users)
	if err := p.Init(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p, users
}

// mortal returns a pool on the same folder whose process ends after a number of steps.
func mortal(t *testing.T, p *Pool, steps int) (*Pool, *killer) {
	t.Helper()
	m := newPool(t, p.cfg.Path, p.users)
	k := &killer{left: steps}
	m.openFolder = func(path string) (folder, error) {
		d, err := openFolder(path)
		k.folder = d
		return k, err
	}
	return m, k
}

// temporaries counts the unfinished files in the folder of p.
func temporaries(t *testing.T, p *Pool) (n int) {
	t.Helper()
	entries, err := os.ReadDir(p.cfg.Path)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), tempPrefix) {
			n++
		}
	}
	return n
}

func must[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}
