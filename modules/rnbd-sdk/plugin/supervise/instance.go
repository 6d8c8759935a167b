package supervise

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plugin"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Instance is one process of a plugin, with its rings.
type Instance struct {
	Process
	Generation uint32      // 1 for the first process, then counting, failed starts too
	Rings      []*shm.Ring // by pump; closed after Left

	log  *slog.Logger
	life context.Context // ends with the process
	end  context.CancelFunc

	mu     sync.Mutex
	killed error // why, by Kill
}

// Context ends when the process has ended, or is given up on.
func (in *Instance) Context() context.Context { return in.life }

// Kill kills the process because of cause. The cause is logged and passed to
// Left. It does not wait, and may be called on a thread of the data path.
// Calls after the first do nothing.
func (in *Instance) Kill(cause error) {
	in.mu.Lock()
	first := in.killed == nil
	if first {
		in.killed = cause
	}
	in.mu.Unlock()
	if !first {
		return
	}
	in.log.Error("plugin is killed", "err", cause)
	go in.Process.Kill()
}

// isKilled reports whether Kill was called.
func (in *Instance) isKilled() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.killed != nil
}

// cause is why the process ended.
func (in *Instance) cause() error {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.killed != nil {
		return fmt.Errorf("killed: %w", in.killed)
	}
	if err := in.Process.ExitError(); err != nil {
		return err
	}
	return plugin.ErrExited
}

func (in *Instance) closeRings() {
	for _, r := range in.Rings {
		_ = r.Close()
	}
	in.Rings = nil
}
