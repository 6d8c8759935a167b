package mappings

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// fake is a daemon. Its servers may be away, and its devices may be in use.
type fake struct {
	mu     sync.Mutex
	mapped map[string]Mapped
	away   map[string]bool // servers
	hangs  map[string]bool // servers with maps that never end
	used   map[string]bool // devices
	tries  map[string]int  // by server
	n      int
}

func newFake() *fake {
	return &fake{mapped: map[string]Mapped{}, away: map[string]bool{}, hangs: map[string]bool{}, used: map[string]bool{}, tries: map[string]int{}}
}

func (f *fake) Map(ctx context.Context, m Mapping) (string, error) {
	f.mu.Lock()
	server := m.Server[0]
	f.tries[server]++
	hangs, away := f.hangs[server], f.away[server]
	f.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return "", ctx.Err()
	}
	if away {
		return "", fmt.Errorf("server %s: %w", server, syscall.ECONNREFUSED)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	name := m.Name
	if name == "" {
		name = fmt.Sprintf("rnbd%d", f.n)
		f.n++
	}
	f.mapped[name] = Mapped{m.Device, m.Session, m.access()}
	return name, nil
}

func (f *fake) Unmap(_ context.Context, name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.used[name] {
		return syscall.EBUSY
	}
	delete(f.mapped, name)
	return nil
}

func (f *fake) Mapped() map[string]Mapped {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := map[string]Mapped{}
	for n, m := range f.mapped {
		out[n] = m
	}
	return out
}

func (f *fake) triesOf(server string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.tries[server]
}

func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func at(server, device, name string) Mapping {
	return Mapping{Device: device, Server: []string{server}, Name: name}
}

// run makes a Keeper under virtual time.
func run(t *testing.T, test func(t *testing.T, f *fake, k *Keeper)) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		k := NewKeeper(f, slog.New(slog.DiscardHandler))
		defer k.Close()
		test(t, f, k)
	})
}

func lines(changes []Change) string {
	var out []string
	for _, c := range changes {
		out = append(out, c.String())
	}
	return strings.Join(out, "\n")
}

func TestAServerThatIsAwayDelaysNoOther(t *testing.T) {
	run(t, func(t *testing.T, f *fake, k *Keeper) {
		f.away["10.0.0.1"], f.hangs["10.0.0.2"] = true, true
		k.Want(t.Context(), []Mapping{at("10.0.0.1", "a", "rnbd0"), at("10.0.0.2", "b", "rnbd1"), at("10.0.0.3", "c", "rnbd2")}, false)
		synctest.Wait()
		if m := f.Mapped(); len(m) != 1 || m["rnbd2"].Device != "c" {
			t.Errorf("mapped %v", m)
		}
		time.Sleep(10 * time.Minute)
		if n := f.triesOf("10.0.0.1"); n < 20 || n > 30 { // pauses grow to 30 s
			t.Errorf("%d attempts in 10 minutes", n)
		}
		f.set(func() { f.away["10.0.0.1"] = false })
		time.Sleep(lastPause)
		synctest.Wait()
		if f.Mapped()["rnbd0"].Device != "a" {
			t.Errorf("it is back, and mapped is %v", f.Mapped())
		}
	})
}

func TestWhatIsMappedFollowsTheConfiguration(t *testing.T) {
	run(t, func(t *testing.T, f *fake, k *Keeper) {
		want := func(all []Mapping, changes string) {
			t.Helper()
			for _, dry := range []bool{true, false} {
				if got := lines(k.Want(t.Context(), all, dry)); got != changes {
					t.Errorf("dry %v: changes\n%s\nwant\n%s", dry, got, changes)
				}
				synctest.Wait()
			}
		}
		a, b := at("10.0.0.1", "a", "rnbd0"), at("10.0.0.1", "b", "rnbd1")
		f.mapped["rnbd9"] = Mapped{"z", "s", "rw"}  // by hand
		f.mapped["rnbd1"] = Mapped{"b", "s1", "rw"} // by hand, as the configuration wants it
		want([]Mapping{a, b}, "map a from 10.0.0.1 rw")
		want([]Mapping{a, b}, "")
		ro := a
		ro.Access = "ro"
		want([]Mapping{ro, b}, "unmap a from 10.0.0.1 rw\nmap a from 10.0.0.1 ro")
		if f.Mapped()["rnbd0"].Access != "ro" {
			t.Errorf("mapped %v", f.Mapped())
		}
		f.set(func() { delete(f.mapped, "rnbd0") })
		want([]Mapping{ro, b}, "map a from 10.0.0.1 ro")
		want(nil, "unmap b from 10.0.0.1 rw\nunmap a from 10.0.0.1 ro")
		if m := f.Mapped(); len(m) != 1 || m["rnbd9"].Device != "z" {
			t.Errorf("mapped %v", m)
		}
	})
}

func TestADeviceInUseIsLeft(t *testing.T) {
	run(t, func(t *testing.T, f *fake, k *Keeper) {
		k.Want(t.Context(), []Mapping{at("10.0.0.1", "a", "rnbd0")}, false)
		synctest.Wait()
		f.set(func() { f.used["rnbd0"] = true })
		if got := lines(k.Want(t.Context(), nil, false)); got != "unmap a from 10.0.0.1 rw: device or resource busy" {
			t.Errorf("changes %q", got)
		}
		f.set(func() { f.used["rnbd0"] = false })
		if got := lines(k.Want(t.Context(), nil, false)); got != "unmap a from 10.0.0.1 rw" {
			t.Errorf("then: changes %q", got)
		}
		if len(f.Mapped()) != 0 {
			t.Errorf("mapped %v", f.Mapped())
		}
	})
}

func TestAMappingThatIsGivenUpIsNotTriedAgain(t *testing.T) {
	run(t, func(t *testing.T, f *fake, k *Keeper) {
		f.hangs["10.0.0.1"] = true
		k.Want(t.Context(), []Mapping{at("10.0.0.1", "a", "rnbd0")}, false)
		synctest.Wait()
		k.Want(t.Context(), nil, false)
		f.set(func() { f.hangs["10.0.0.1"] = false })
		time.Sleep(time.Hour)
		if n := f.triesOf("10.0.0.1"); n != 1 || len(f.Mapped()) != 0 {
			t.Errorf("%d attempts, mapped %v", n, f.Mapped())
		}
	})
}

func TestWrongMappings(t *testing.T) {
	for _, c := range []struct {
		name string
		m    Mapping
		key  string
		want string
	}{
		{"right", Mapping{Device: "a", Server: []string{"10.0.0.1", "10.0.0.2@10.1.0.1:99%rocev2"}, Access: "ro", Loss: "queue:30s"}, "", ""},
		{"of a session", Mapping{Device: "a", Session: "s"}, "", ""},
		{"no device", Mapping{Server: []string{"10.0.0.1"}}, "", "needs a device"},
		{"no server", Mapping{Device: "a"}, "", "needs a server"},
		{"a host's name", Mapping{Device: "a", Server: []string{"storage"}}, "server", "no IP address"},
		{"a port out of range", Mapping{Device: "a", Server: []string{"10.0.0.1:99999"}}, "server", "99999"},
		{"access", Mapping{Device: "a", Session: "s", Access: "wr"}, "access", "ro, rw or migration"},
		{"loss", Mapping{Device: "a", Session: "s", Loss: "queue"}, "loss", "queue"},
		{"name", Mapping{Device: "a", Session: "s", Name: "a/b"}, "name", "slash"},
		{"word of the commands", Mapping{Device: "a", Session: "s", Name: "all"}, "name", "another thing"},
	} {
		key, err := c.m.Check()
		if key != c.key || (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %q, %v", c.name, key, err)
		}
	}
	a := at("10.0.0.1", "a", "rnbd0")
	for _, twice := range [][]Mapping{{a, a}, {a, at("10.0.0.2", "b", "rnbd0")}, {at("10.0.0.1", "a", ""), at("10.0.0.1", "a", "")}} {
		if err := CheckAll(twice); err == nil {
			t.Errorf("%v: no error", twice)
		}
	}
	if err := CheckAll([]Mapping{a, at("10.0.0.1", "b", "rnbd1"), at("10.0.0.1", "c", "")}); err != nil {
		t.Error(err)
	}
}

// A Keeper goes on for one of another process: devices without a name of their own stay
// those of their mappings, and what the configuration says now holds.
func TestInherit(t *testing.T) {
	f := newFake()
	same, changed, gone := Mapping{Device: "a", Server: []string{"s"}}, Mapping{Device: "b", Server: []string{"s"}, Loss: "fail"}, Mapping{Device: "c", Server: []string{"s"}}
	synctest.Test(t, func(t *testing.T) {
		k := NewKeeper(f, slog.New(slog.DiscardHandler))
		k.Want(t.Context(), []Mapping{same, changed, gone}, false)
		k.AwaitTried(t.Context())
		synctest.Wait()
		kept := k.Kept()
		k.Close()
		if len(kept) != 3 {
			t.Fatalf("kept: %v", kept)
		}
		next := NewKeeper(f, slog.New(slog.DiscardHandler))
		if err := next.Inherit(kept); err != nil {
			t.Fatal(err)
		}
		changed.Loss = "queue:1s"
		next.Want(t.Context(), []Mapping{same, changed}, false)
		next.AwaitTried(t.Context())
		synctest.Wait()
		if n := f.triesOf("s"); n != 4 {
			t.Errorf("%d maps, want one for each and another one for what has changed", n)
		}
		if len(f.Mapped()) != 2 {
			t.Errorf("mapped: %v", f.Mapped())
		}
		next.Close()
	})
	if err := NewKeeper(f, slog.New(slog.DiscardHandler)).Inherit(map[string]string{"x": "[]"}); err == nil {
		t.Error("no error")
	}
}

// AwaitTried reports attempts that Close has cut off: their devices are missing.
// An attempt that has failed was made, and so was the one before a mapping is no
// longer wanted.
func TestAwaitTried(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.away["gone"], f.hangs["stuck"] = true, true
		k := NewKeeper(f, slog.New(slog.DiscardHandler))
		k.Want(t.Context(), []Mapping{at("gone", "a", "a"), at("there", "b", "b")}, false)
		if err := k.AwaitTried(t.Context()); err != nil {
			t.Errorf("all were tried: %v", err)
		}
		k.Want(t.Context(), []Mapping{at("stuck", "c", "c")}, false)
		k.Want(t.Context(), nil, false)
		if err := k.AwaitTried(t.Context()); err != nil {
			t.Errorf("nothing is wanted: %v", err)
		}
		k.Want(t.Context(), []Mapping{at("stuck", "c", "c")}, false)
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := k.AwaitTried(short); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("an attempt lasts longer than the wait: %v", err)
		}
		k.Close()
		if err := k.AwaitTried(t.Context()); !errors.Is(err, context.Canceled) {
			t.Errorf("an attempt was cut off: %v", err)
		}
	})
}
