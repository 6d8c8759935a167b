package rtrs

import (
	"log/slog"
	"testing"
)

func TestPathState_MovesAreThoseOfTheDiagram(t *testing.T) {
	const n = PathDead + 1
	allowed := map[[2]PathState]bool{
		{PathConnecting, PathConnected}:       true,
		{PathConnecting, PathConnectingErr}:   true,
		{PathConnecting, PathClosing}:         true,
		{PathConnected, PathReconnecting}:     true,
		{PathConnected, PathClosing}:          true,
		{PathConnectingErr, PathReconnecting}: true,
		{PathConnectingErr, PathClosing}:      true,
		{PathReconnecting, PathConnecting}:    true,
		{PathReconnecting, PathClosing}:       true,
		{PathClosing, PathClosed}:             true,
		{PathClosed, PathReconnecting}:        true,
		{PathClosed, PathDead}:                true,
	}
	for from := range n {
		for to := range n {
			p := &path{
				session: &Session{events: newEventQueue()},
				log:     slog.New(slog.DiscardHandler),
				state:   from,
				changed: make(chan struct{}),
			}
			want, after := allowed[[2]PathState{from, to}], from
			if want {
				after = to
			}
			if got := p.setState(to, nil); got != want || p.State() != after {
				t.Errorf("%v -> %v: accepted = %v, then %v", from, to, got, p.State())
			}
		}
	}
}
