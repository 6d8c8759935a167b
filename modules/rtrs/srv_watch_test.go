package rtrs

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
)

// watchingHandler records the calls of a handler that watches paths.
type watchingHandler struct {
	*testHandler
	mu    sync.Mutex
	calls []string
}

func (h *watchingHandler) note(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, fmt.Sprintf(format, args...))
}

func (h *watchingHandler) said() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.calls)
}

func (h *watchingHandler) SessionUp(s *SrvSession) error {
	h.note("session up")
	return h.testHandler.SessionUp(s)
}

func (h *watchingHandler) SessionDown(s *SrvSession) {
	h.note("session down")
	h.testHandler.SessionDown(s)
}

func (h *watchingHandler) PathConnected(_ *SrvSession, p SrvPathInfo) {
	h.note("%s connected, path %s", p.Client.Addr(), p.State)
}

func (h *watchingHandler) PathClosed(_ *SrvSession, p SrvPathInfo, cause error) {
	h.note("%s closed: %v", p.Client.Addr(), cause)
}

// A watcher learns of each path once when it is connected and once when it ends,
// between the calls about its session. A path that was never connected is none of
// its business.
func TestPathWatcher(t *testing.T) {
	net := loopback.New()
	var h *watchingHandler
	startServer(t, net, serve, func(c *ServerConfig) {
		h = &watchingHandler{testHandler: c.Handler.(*testHandler)}
		c.Handler = h
	})
	unfinished := from(t, net, otherAddr, 2).connect()
	a := from(t, net, clientAddr, 2).connect().info("s")
	b := a.second(net, otherAddr).connect().info("s")
	b.stillWorks()
	a.hangUp()
	eventually(t, "the first path to end", func() bool { return len(h.said()) == 4 })
	b.stillWorks()
	b.hangUp()
	eventually(t, "the session to end", func() bool { return len(h.said()) == 6 })
	unfinished.hangUp()
	calls := h.said()
	want := []string{"session up", "10.1.0.1 connected, path connected", "10.1.0.2 connected, path connected", "10.1.0.1 closed: ", "10.1.0.2 closed: ", "session down"}
	for i, w := range want {
		if !strings.HasPrefix(calls[i], w) {
			t.Errorf("call %d is %q, want %q", i+1, calls[i], w)
		}
	}
}
