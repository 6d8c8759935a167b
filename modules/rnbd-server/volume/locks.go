package volume

import (
	"context"
	"sync"
)

// locks are locks by name. The zero value has none.
type locks struct {
	mu    sync.Mutex
	named map[string]*lock
}

type lock struct {
	token chan struct{} // has one while the lock is free
	users int           // holders and waiters; guarded by locks.mu
}

// take waits for the lock of name until ctx ends. release must follow.
func (l *locks) take(ctx context.Context, name string) (release func(), err error) {
	l.mu.Lock()
	one := l.named[name]
	if one == nil {
		one = &lock{token: make(chan struct{}, 1)}
		one.token <- struct{}{}
		if l.named == nil {
			l.named = map[string]*lock{}
		}
		l.named[name] = one
	}
	one.users++
	l.mu.Unlock()
	drop := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if one.users--; one.users == 0 {
			delete(l.named, name)
		}
	}
	select {
	case <-one.token:
		return func() { one.token <- struct{}{}; drop() }, nil
	case <-ctx.Done():
		drop()
		return nil, context.Cause(ctx)
	}
}
