package pump

import (
	"context"
	"errors"
	"testing"
	"time"
)

func TestPing_OfAPumpThatHangs(t *testing.T) {
	p, err := New(Config{Name: "ping"})
	if err != nil {
		t.Fatal(err)
	}
	p.Start()
	defer p.Stop()
	if err := p.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	release := make(chan struct{})
	p.Do(func() { <-release })
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := p.Ping(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a pump that hangs: %v", err)
	}
	close(release)
	if err := p.Ping(t.Context()); err != nil {
		t.Errorf("a pump that hung: %v", err)
	}
}
