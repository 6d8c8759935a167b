package volume

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
)

// contents is what a test knows of a volume: its size and its first block, which tells
// volumes and copies apart.
type contents struct {
	size  uint64
	first [16]byte
	meta  string // grants, privacy and source
}

// look returns the volumes of a pool, as a process that has just started sees them.
func look(t *testing.T, p *Pool) map[string]contents {
	t.Helper()
	fresh := newPool(t, p.cfg.Path, &fakeUsers{})
	list := must(fresh.List(t.Context()))(t)
	if n := temporaries(t, p); n != 0 {
		t.Fatalf("%d temporary files are left", n)
	}
	out := map[string]contents{}
	for _, v := range list {
		c := contents{size: v.Size, meta: fmt.Sprint(v.Private, v.Grants, v.Source)}
		f := must(os.Open(filepath.Join(p.cfg.Path, v.String())))(t)
		must(f.ReadAt(c.first[:], 0))(t)
		f.Close()
		out[v.String()] = c
	}
	return out
}

// TestKillBeforeEachStep ends a process before each step of each command. The next
// process finds the volumes as before the command or as after it, and the command
// succeeds when it is repeated.
func TestKillBeforeEachStep(t *testing.T) {
	commands := map[string]func(ctx context.Context, p *Pool) error{
		"create": func(ctx context.Context, p *Pool) error {
			return second(p.Create(ctx, "new", CreateOptions{Size: mib}))
		},
		"resize":          func(ctx context.Context, p *Pool) error { return second(p.Resize(ctx, "old", 2*mib, false)) },
		"shrink":          func(ctx context.Context, p *Pool) error { return second(p.Resize(ctx, "old", mib/2, true)) },
		"delete":          func(ctx context.Context, p *Pool) error { return p.Delete(ctx, Name{Volume: "old"}, true) },
		"snapshot":        func(ctx context.Context, p *Pool) error { return second(p.Snapshot(ctx, "old", "two", "")) },
		"delete snapshot": func(ctx context.Context, p *Pool) error { return p.Delete(ctx, Name{"old", "one"}, false) },
		"clone": func(ctx context.Context, p *Pool) error {
			return second(p.Clone(ctx, Name{"old", "one"}, "new", CreateOptions{Size: 2 * mib}))
		},
		"publish": func(ctx context.Context, p *Pool) error {
			return second(p.Publish(ctx, Name{Volume: "old"}, "node1", "rw"))
		},
		"unpublish": func(ctx context.Context, p *Pool) error {
			return p.Unpublish(ctx, Name{Volume: "old"}, "node0", func(ID) error { return nil })
		},
	}
	for name, command := range commands {
		t.Run(name, func(t *testing.T) {
			before, after, steps := states(t, command)
			if maps.Equal(before, after) {
				t.Fatal("the command changes nothing")
			}
			for n := range steps {
				p := prepared(t)
				victim, _ := mortal(t, p, n)
				if err := command(t.Context(), victim); !errors.Is(err, errKilled) {
					t.Fatalf("step %d: %v", n, err)
				}
				if found := look(t, p); !maps.Equal(found, before) && !maps.Equal(found, after) {
					t.Errorf("killed before step %d: %v", n, found)
				}
				if err := command(t.Context(), newPool(t, p.cfg.Path, p.users)); err != nil {
					t.Errorf("repeated after a kill before step %d: %v", n, err)
				}
				if found := look(t, p); !maps.Equal(found, after) {
					t.Errorf("repeated after a kill before step %d: %v, want %v", n, found, after)
				}
			}
		})
	}
}

// prepared returns a pool with a volume and a snapshot.
func prepared(t *testing.T) *Pool {
	t.Helper()
	p, _ := made(t)
	must(p.Create(t.Context(), "old", CreateOptions{Size: mib}))(t)
	stamp(t, p, "old", 1)
	must(p.Snapshot(t.Context(), "old", "one", ""))(t)
	must(p.Publish(t.Context(), Name{Volume: "old"}, "node0", "rw"))(t)
	return p
}

// stamp writes a number into the first block of a volume.
func stamp(t *testing.T, p *Pool, name string, number int) {
	t.Helper()
	f := must(os.OpenFile(filepath.Join(p.cfg.Path, name), os.O_RDWR, 0))(t)
	defer f.Close()
	must(f.WriteAt(fmt.Appendf(nil, "stamp %10d", number), 0))(t)
}

// states returns the volumes before and after a command, and how many steps it has.
func states(t *testing.T, command func(context.Context, *Pool) error) (before, after map[string]contents, steps int) {
	t.Helper()
	p := prepared(t)
	before = look(t, p)
	whole, k := mortal(t, p, -1)
	if err := command(t.Context(), whole); err != nil {
		t.Fatal(err)
	}
	return before, look(t, p), k.steps
}

// TestDurableBeforeVisible looks at the order of the steps that a power cut would tell
// apart.
func TestDurableBeforeVisible(t *testing.T) {
	p, _ := made(t)
	whole, k := mortal(t, p, -1)
	must(whole.Create(t.Context(), "a", CreateOptions{Size: mib}))(t)
	sync, rename := slices.Index(k.trace, "sync"), slices.Index(k.trace, "rename")
	if sync < 0 || rename < sync || !slices.Contains(k.trace[rename:], "syncFolder") || slices.Contains(k.trace[sync:rename], "setAttr") {
		t.Errorf("create: %v", k.trace)
	}
	k.trace = nil
	if err := whole.Delete(t.Context(), Name{Volume: "a"}, false); err != nil {
		t.Fatal(err)
	}
	if i := slices.Index(k.trace, "remove"); i < 0 || !slices.Contains(k.trace[i:], "syncFolder") {
		t.Errorf("delete: %v", k.trace)
	}
}

// model is what the volumes of a pool should be.
type model map[string]contents

// command changes a pool and the model of it in the same way. The error is the errno
// that the pool is expected to return, 0 for success.
type command struct {
	text string
	do   func(ctx context.Context, p *Pool) error
	to   func(m model) syscall.Errno
}

// draw returns a random command on few names, so that they meet.
func draw(r *rand.Rand) command {
	a, b := fmt.Sprint("v", r.IntN(3)), fmt.Sprint("v", r.IntN(3))
	snap := fmt.Sprint("s", r.IntN(2))
	size := uint64(1+r.IntN(3)) * 64 << 10
	switch r.IntN(7) {
	case 0:
		return command{fmt.Sprint("create ", a, size), func(ctx context.Context, p *Pool) error {
			return second(p.Create(ctx, a, CreateOptions{Size: size}))
		}, func(m model) syscall.Errno {
			if c, ok := m[a]; ok {
				return differs(c.size != size || sourceOf(c) != "")
			}
			m[a] = contents{size: size, meta: metaText(false, "")}
			return 0
		}}
	case 1:
		return command{fmt.Sprint("delete ", a), func(ctx context.Context, p *Pool) error {
			return p.Delete(ctx, Name{Volume: a}, false)
		}, func(m model) syscall.Errno {
			if _, ok := m[a]; ok {
				for name := range m {
					if len(name) > len(a) && name[:len(a)+1] == a+"@" {
						return syscall.ENOTEMPTY
					}
				}
			}
			delete(m, a)
			return 0
		}}
	case 2:
		return command{fmt.Sprint("resize ", a, size), func(ctx context.Context, p *Pool) error {
			return second(p.Resize(ctx, a, size, true))
		}, func(m model) syscall.Errno {
			c, ok := m[a]
			if !ok {
				return syscall.ENOENT
			}
			c.size = size
			m[a] = c
			return 0
		}}
	case 3, 4:
		to := a + "@" + snap
		return command{"snapshot " + to, func(ctx context.Context, p *Pool) error {
			return second(p.Snapshot(ctx, a, snap, ""))
		}, func(m model) syscall.Errno { return m.copy(a, to, 0) }}
	case 5:
		return command{fmt.Sprint("delete ", a, "@", snap), func(ctx context.Context, p *Pool) error {
			return p.Delete(ctx, Name{a, snap}, false)
		}, func(m model) syscall.Errno { delete(m, a+"@"+snap); return 0 }}
	}
	return command{fmt.Sprint("clone ", a, "@", snap, " ", b, size), func(ctx context.Context, p *Pool) error {
		return second(p.Clone(ctx, Name{a, snap}, b, CreateOptions{Size: size}))
	}, func(m model) syscall.Errno { return m.copy(a+"@"+snap, b, size) }}
}

func metaText(private bool, source string) string {
	return fmt.Sprint(private, map[string]string(nil), source)
}

// sourceOf returns the source in c.meta of a volume without grants.
func sourceOf(c contents) string { return c.meta[len(metaText(false, "")):] }

func differs(yes bool) syscall.Errno {
	if yes {
		return syscall.EEXIST
	}
	return 0
}

func (m model) copy(from, to string, size uint64) syscall.Errno {
	if c, ok := m[to]; ok {
		return differs(sourceOf(c) != from || size != 0 && c.size != size)
	}
	c, ok := m[from]
	switch {
	case !ok:
		return syscall.ENOENT
	case size != 0 && size < c.size:
		return syscall.EINVAL
	}
	m[to] = contents{size: max(size, c.size), first: c.first, meta: metaText(false, from)}
	return 0
}

// TestRandomCommandsWithKills compares pools with a model, through 1,000 sequences of
// commands. Processes end before random steps.
func TestRandomCommandsWithKills(t *testing.T) {
	sequences := 1000
	if testing.Short() {
		sequences = 100
	}
	for seed := range sequences {
		r := rand.New(rand.NewPCG(uint64(seed), 1))
		p, _ := made(t)
		m := model{}
		for n := range 12 {
			c := draw(r)
			after := maps.Clone(m)
			want := c.to(after)
			steps := -1
			if r.IntN(2) == 0 {
				steps = r.IntN(20)
			}
			victim, _ := mortal(t, p, steps)
			err := c.do(t.Context(), victim)
			found := look(t, p)
			switch {
			case errors.Is(err, errKilled):
				if !maps.Equal(found, m) && !maps.Equal(found, after) {
					t.Fatalf("seed %d: %s, killed before step %d: %v, before %v, after %v", seed, c.text, steps, found, m, after)
				}
			case want == 0 && err != nil, want != 0 && !errors.Is(err, want):
				t.Fatalf("seed %d: %s: %v, want %v", seed, c.text, err, want)
			case !maps.Equal(found, after):
				t.Fatalf("seed %d: %s: %v, want %v", seed, c.text, found, after)
			}
			m = found
			for name, v := range m { // from now on this one differs from its copies
				if name == "v0" && bytes.Count(v.first[:], []byte{0}) == len(v.first) {
					stamp(t, p, name, seed*100+n)
					m = look(t, p)
				}
			}
		}
		if err := os.RemoveAll(p.cfg.Path); err != nil {
			t.Fatal(err)
		}
	}
}
