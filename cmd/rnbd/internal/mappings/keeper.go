package mappings

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/names"
)

// Daemon is the client daemon as a Keeper sees it. Its methods may be called at
// the same time.
type Daemon interface {
	// Map maps m and returns the name of the device.
	Map(ctx context.Context, m Mapping) (name string, err error)
	// Unmap takes a device away; EBUSY in the chain: it is in use.
	Unmap(ctx context.Context, name string) error
	// Mapped lists the mapped devices by their names.
	Mapped() map[string]Mapped
}

// Mapped is a device that is there. Access, as "rw", is its access mode.
type Mapped struct{ Device, Session, Access string }

// Pauses between two attempts to map.
const (
	firstPause = time.Second
	lastPause  = 30 * time.Second
)

// Keeper maps the devices of a configuration. Its methods may be called at
// the same time.
type Keeper struct {
	daemon Daemon
	log    *slog.Logger
	life   context.Context
	end    context.CancelFunc
	tries  sync.WaitGroup
	first  time.Duration // pause after the first attempt

	turn   sync.Mutex // of one Want at a time, before mu
	mu     sync.Mutex
	wanted []*entry
}

// entry is a mapping that is wanted.
type entry struct {
	Mapping
	stop  context.CancelFunc
	done  chan struct{} // closed when no attempt is under way or to come
	tried chan struct{} // closed after the first attempt
	name  string        // of its device; guarded by Keeper.mu, empty until it is mapped
}

// NewKeeper returns a Keeper that wants nothing yet.
func NewKeeper(d Daemon, log *slog.Logger) *Keeper {
	k := &Keeper{daemon: d, log: log, first: firstPause}
	k.life, k.end = context.WithCancel(context.Background())
	return k
}

// Close ends the attempts. Mapped devices stay.
func (k *Keeper) Close() {
	k.end()
	k.tries.Wait()
}

// Actions of a Change.
const (
	Map   = "map"
	Unmap = "unmap"
)

// Change is a difference between the configuration and the mapped devices. Err
// is why it was not made; a map under way has none.
type Change struct {
	Action string
	Mapping
	Err error
}

// Want makes the mapped devices follow the configuration: new mappings are
// begun, and those that an earlier call wanted and this one does not are taken
// away. One that is in use stays wanted as it was. A wanted mapping that was
// unmapped by hand is mapped again. Devices that no configuration has asked for
// are left alone. With dry nothing is done.
func (k *Keeper) Want(ctx context.Context, all []Mapping, dry bool) (changes []Change) {
	k.turn.Lock()
	defer k.turn.Unlock()
	k.mu.Lock()
	defer k.mu.Unlock()
	mapped := k.daemon.Mapped()
	var kept []*entry
	for _, e := range k.wanted {
		i := slices.IndexFunc(all, func(m Mapping) bool { return m.equal(&e.Mapping) })
		_, there := mapped[e.name]
		if i >= 0 && (there || !e.ended()) {
			kept = append(kept, e)
			continue
		}
		if i >= 0 { // unmapped by hand
			continue
		}
		c := Change{Action: Unmap, Mapping: e.Mapping}
		c.Name = e.name
		if !dry {
			c.Err = k.giveUp(ctx, e, there)
		}
		if there || c.Err != nil {
			changes = append(changes, c)
		}
		if c.Err != nil {
			kept = append(kept, e)
			continue
		}
		delete(mapped, e.name)
	}
	for _, m := range all {
		if slices.ContainsFunc(kept, func(e *entry) bool { return m.equal(&e.Mapping) }) {
			continue
		}
		if i := slices.IndexFunc(kept, func(e *entry) bool { return e.id() == m.id() }); i >= 0 {
			continue // it was changed, and the device as it was is in use
		}
		if !there(mapped, m) {
			changes = append(changes, Change{Action: Map, Mapping: m})
		}
		if !dry {
			kept = append(kept, k.begin(m))
		}
	}
	if !dry {
		k.wanted = kept
	}
	return changes
}

// Kept returns the wanted mappings that have a device, as YAML by the device's name.
func (k *Keeper) Kept() map[string]string {
	k.mu.Lock()
	defer k.mu.Unlock()
	kept := map[string]string{}
	for _, e := range k.wanted {
		if text, err := yaml.Marshal(e.Mapping); err == nil && e.name != "" {
			kept[e.name] = string(text)
		}
	}
	return kept
}

// Inherit makes this Keeper go on for one of another process, with the devices that it
// kept. It comes before Want.
func (k *Keeper) Inherit(kept map[string]string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	ended := make(chan struct{})
	close(ended)
	for name, text := range kept {
		e := &entry{stop: func() {}, done: ended, tried: ended, name: name}
		if err := yaml.Unmarshal([]byte(text), &e.Mapping); err != nil {
			return fmt.Errorf("mapping of %s: %w", name, err)
		}
		k.wanted = append(k.wanted, e)
	}
	return nil
}

func (e *entry) ended() bool {
	select {
	case <-e.done:
		return true
	default:
		return false
	}
}

// giveUp ends the attempts for e and takes its device away. Caller holds mu.
func (k *Keeper) giveUp(ctx context.Context, e *entry, there bool) error {
	e.stop()
	k.mu.Unlock()
	<-e.done
	k.mu.Lock()
	if e.name == "" {
		return nil
	}
	err := k.daemon.Unmap(ctx, e.name)
	if errors.Is(err, syscall.ENOENT) {
		return nil
	}
	return err
}

// there reports whether a device is mapped that serves for m.
func there(mapped map[string]Mapped, m Mapping) bool {
	_, ok := find(mapped, m)
	return ok
}

func find(mapped map[string]Mapped, m Mapping) (name string, ok bool) {
	for name, d := range mapped {
		if d.Device == names.Parse(m.Device) && d.Access == m.access() && (m.Name == "" || m.Name == name) && (m.Session == "" || names.Parse(m.Session) == d.Session) &&
			(m.Name != "" || m.Session != "") {
			return name, true
		}
	}
	return "", false
}

// begin starts the attempts for m. Caller holds mu.
func (k *Keeper) begin(m Mapping) *entry {
	e := &entry{Mapping: m, done: make(chan struct{}), tried: make(chan struct{})}
	var ctx context.Context
	ctx, e.stop = context.WithCancel(k.life)
	k.tries.Go(func() {
		defer close(e.done)
		var once sync.Once
		first := func() { once.Do(func() { close(e.tried) }) }
		defer first()
		k.keepTrying(ctx, e, first)
	})
	return e
}

// AwaitTried waits until each wanted mapping has been tried once. The error is that
// of ctx, or context.Canceled after Close: attempts that Close has cut off were
// not made.
func (k *Keeper) AwaitTried(ctx context.Context) error {
	k.mu.Lock()
	wanted := slices.Clone(k.wanted)
	k.mu.Unlock()
	for _, e := range wanted {
		select {
		case <-e.tried:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return k.life.Err()
}

// keepTrying maps e, again and again, and calls tried after each attempt. An
// error is logged once.
func (k *Keeper) keepTrying(ctx context.Context, e *entry, tried func()) {
	log := k.log.With("mapping", e.String())
	for pause, last := k.first, ""; ; pause = min(2*pause, lastPause) {
		name, ok := find(k.daemon.Mapped(), e.Mapping)
		var err error
		if !ok {
			name, err = k.daemon.Map(ctx, e.Mapping)
		}
		tried()
		switch {
		case err == nil:
			k.mu.Lock()
			e.name = name
			k.mu.Unlock()
			log.Info("mapping of the configuration is there", "device", name)
			return
		case ctx.Err() != nil:
			return
		case err.Error() != last:
			last = err.Error()
			log.Warn("mapping of the configuration is tried again until it works", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
	}
}

// String describes the change as a line.
func (c Change) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s", c.Action, c.Mapping)
	if c.Err != nil {
		fmt.Fprintf(&b, ": %v", c.Err)
	}
	return b.String()
}
