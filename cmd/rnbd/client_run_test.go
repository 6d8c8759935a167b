package main

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/mappings"
)

// stuckMapper is a client whose maps end only with their context.
type stuckMapper struct{ mappings.Daemon }

func (stuckMapper) Mapped() map[string]mappings.Mapped { return nil }

func (stuckMapper) Map(ctx context.Context, _ mappings.Mapping) (string, error) {
	<-ctx.Done()
	return "", ctx.Err()
}

// userCounter counts calls of ServeUsers.
type userCounter int

func (n *userCounter) ServeUsers(context.Context) { *n++ }

// TestServeUsers has a daemon end while a mapping is tried: it lets no user in, who
// would be told that the device does not exist. A mapping that takes too long keeps
// users out only for a time.
func TestServeUsers(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(stop context.CancelFunc, k *mappings.Keeper)
		want userCounter
	}{
		{"signal", func(stop context.CancelFunc, _ *mappings.Keeper) { stop() }, 0},
		{"closed", func(_ context.CancelFunc, k *mappings.Keeper) { k.Close() }, 0},
		{"signal, and closed", func(stop context.CancelFunc, k *mappings.Keeper) { stop(); k.Close() }, 0},
		{"time is over", func(context.CancelFunc, *mappings.Keeper) {}, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			k := mappings.NewKeeper(stuckMapper{}, slog.New(slog.DiscardHandler))
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			k.Want(ctx, []mappings.Mapping{{Device: "a", Server: []string{"10.0.0.1"}}}, false)
			var served userCounter
			done := make(chan struct{})
			go func() {
				defer close(done)
				serveUsers(ctx, k, &served)
			}()
			synctest.Wait()
			c.end(stop, k)
			<-done
			k.Close()
			if served != c.want {
				t.Errorf("%s: users are let in %d times, want %d", c.name, served, c.want)
			}
		})
	}
}
