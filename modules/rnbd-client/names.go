package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs"
)

// The default name of a session has a token. It is the same after a restart of the client,
// so that links and labels of metrics stay, and differs between the clients of a host.

// hostIDFiles have an identity of this host: the first one that is there counts. The
// second one changes when the host starts.
var hostIDFiles = []string{"/etc/machine-id", "/proc/sys/kernel/random/boot_id"}

// clientToken returns four hexadecimal digits for the client with a state file. Without a
// file there is no next daemon, and they are random.
func clientToken(stateFile string) string {
	host := hostID()
	path, err := filepath.Abs(stateFile)
	if stateFile == "" || host == "" || err != nil {
		return fmt.Sprintf("%04x", rand.Uint32N(1<<16))
	}
	sum := sha256.Sum256([]byte("rnbd client\x00" + host + "\x00" + path))
	return hex.EncodeToString(sum[:2])
}

// hostID returns an identity of this host, or an empty text.
func hostID() string {
	for _, name := range hostIDFiles {
		if text, err := os.ReadFile(name); err == nil && len(strings.TrimSpace(string(text))) > 0 {
			return strings.TrimSpace(string(text))
		}
	}
	return ""
}

// hasDefaultName reports whether the client has made the name of the session.
func (s *session) hasDefaultName() bool { return strings.Contains(s.name, "-"+s.client.token+"@") }

// The name of a session is free again when the server has ended the session. If
// a new one of that name comes earlier, Linux's server drops it, and rnbd's
// lets it wait.

const (
	// nameLingers is the longest time that a server takes to end a session.
	nameLingers = 3 * time.Second
	namePause   = 50 * time.Millisecond
	// killedLingers is the longest time that a server takes to notice the death of the
	// last client: Linux's server waits for heartbeats.
	killedLingers = 40 * time.Second
	killedPause   = time.Second
)

// waitForName reports whether the name may be that of a session that the server is about
// to end, where opening one gave err. It waits before the next attempt.
func (s *session) waitForName(ctx context.Context, err error) bool {
	switch {
	case !errors.Is(err, rtrs.ErrConnLost):
		return false
	case s.client.endedLately(s.name):
		return pauseFor(ctx, namePause)
	case errors.Is(err, rtrs.ErrNameRefused) && s.hasDefaultName() && time.Since(s.client.started) < killedLingers:
		return pauseFor(ctx, killedPause)
	}
	return false
}

// noteEnd records the end of the session of that name.
func (e *endedSessions) noteEnd(name string) {
	if *e == nil {
		*e = endedSessions{}
	}
	for other := range *e {
		if !e.endedLately(other) {
			delete(*e, other)
		}
	}
	(*e)[name] = time.Now()
}

// endedLately reports whether a server may still know the name.
func (e *endedSessions) endedLately(name string) bool {
	at, ok := (*e)[name]
	return ok && time.Since(at) < nameLingers
}

// pauseFor waits for d. It reports false if ctx has ended.
func pauseFor(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

func (c *Client) endedLately(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended.endedLately(name)
}
