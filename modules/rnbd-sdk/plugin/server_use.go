package plugin

import (
	"context"
	"fmt"
	"sync"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// diskUse lets one call of a kind at a disk run at a time, and none while the disk
// closes. A disk that hangs takes up one goroutine, and stays open.
type diskUse struct {
	mu      sync.Mutex
	cancel  context.CancelFunc // of the call that runs; nil: none does
	ended   chan struct{}      // closed when it has returned
	closing bool
}

// begin admits a call. The context that it returns ends with end, too, and when the
// disk is to be closed.
func (u *diskUse) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.closing:
		return nil, nil, fmt.Errorf("is being closed: %w", blk.ENODEV)
	case u.cancel != nil:
		return nil, nil, fmt.Errorf("an earlier call has not returned: %w", blk.EBUSY)
	}
	ctx, u.cancel = context.WithCancel(ctx)
	u.ended = make(chan struct{})
	return ctx, u.end, nil
}

func (u *diskUse) end() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.cancel()
	u.cancel = nil
	close(u.ended)
}

// stop keeps calls out, and returns when none runs, or with an error when ctx ends.
func (u *diskUse) stop(ctx context.Context) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closing = true
	if u.cancel == nil {
		return nil
	}
	u.cancel()
	ended := u.ended
	u.mu.Unlock()
	defer u.mu.Lock()
	select {
	case <-ended:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// resume lets calls in again.
func (u *diskUse) resume() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.closing = false
}

// stop keeps calls other than requests out of the disk, and returns when none runs.
// After an error they are let in again: the disk stays open.
func (r *root) stop(ctx context.Context) error {
	err := r.maps.stop(ctx)
	if err != nil {
		err = fmt.Errorf("its list of extents is still being made: %w", err)
	} else if err = r.sizes.stop(ctx); err != nil {
		err = fmt.Errorf("it is still being resized: %w", err)
	}
	if err != nil {
		r.maps.resume()
		r.sizes.resume()
	}
	return err
}
