package client

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// paths are two with those states, the second with a reason.
func twoPaths(a, b rtrs.PathState) []rtrs.PathInfo {
	all := []rtrs.PathInfo{{ID: 1, State: a}, {ID: 2, State: b, Err: fmt.Errorf("connect: %w", errors.New("refused"))}}
	for i := range all {
		all[i].Fabric = "iwarp"
		all[i].Addr.Dst = netip.MustParseAddrPort(fmt.Sprintf("10.%d.0.1:1234", i))
	}
	return all
}

func TestRedundancyIsWarnedOfOnceThenEveryTenMinutes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text lockedText
		r := &pathWatch{log: slog.New(slog.NewTextHandler(&text, nil))}
		said := func() string {
			synctest.Wait()
			return text.take()
		}
		r.comparePaths(twoPaths(rtrs.PathConnected, rtrs.PathReconnecting)) // the session is being opened
		r.startWatch(twoPaths(rtrs.PathConnected, rtrs.PathConnecting))
		r.comparePaths(twoPaths(rtrs.PathConnected, rtrs.PathConnected))
		if s := said(); s != "" {
			t.Errorf("nothing is lost: %s", s)
		}
		for range 100 { // it fails again and again
			r.comparePaths(twoPaths(rtrs.PathConnected, rtrs.PathReconnecting))
			r.comparePaths(twoPaths(rtrs.PathConnected, rtrs.PathConnecting))
			r.comparePaths(twoPaths(rtrs.PathConnected, rtrs.PathConnectingErr))
		}
		if s := said(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "level=WARN") || !strings.Contains(s, `down="10.1.0.1:1234%iwarp (refused)" left=1 of=2`) {
			t.Errorf("lost: %s", s)
		}
		time.Sleep(remindAfter - time.Second)
		if s := said(); s != "" {
			t.Errorf("too early: %s", s)
		}
		time.Sleep(2 * remindAfter)
		if s := said(); strings.Count(s, "still lost") != 2 {
			t.Errorf("after half an hour: %s", s)
		}
		r.comparePaths(twoPaths(rtrs.PathReconnecting, rtrs.PathReconnecting)) // the last one too: another's warning
		if s := said(); s != "" {
			t.Errorf("no path is left: %s", s)
		}
		r.comparePaths(twoPaths(rtrs.PathConnected, rtrs.PathConnected))
		r.comparePaths(twoPaths(rtrs.PathConnected, rtrs.PathConnected))
		if s := said(); strings.Count(s, "\n") != 1 || !strings.Contains(s, "level=INFO") || !strings.Contains(s, "connected again") {
			t.Errorf("back: %s", s)
		}
		time.Sleep(time.Hour)
		r.comparePaths(twoPaths(rtrs.PathConnected, rtrs.PathClosed))
		if s := said(); strings.Count(s, "\n") != 1 {
			t.Errorf("closed for good: %s", s)
		}
		r.stopWatch()
		said()
		time.Sleep(time.Hour)
		r.comparePaths(twoPaths(rtrs.PathConnected, rtrs.PathConnected))
		if s := said(); s != "" {
			t.Errorf("after the end: %s", s)
		}
	})
}

// lockedText is a log that timers write to.
type lockedText struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lockedText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// take returns the text written since the last call.
func (l *lockedText) take() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.b.Reset()
	return l.b.String()
}
