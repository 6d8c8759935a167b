package server

import (
	"context"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// controlTree builds the nodes.
type controlTree struct{ s *Server }

// openSessions lists the sessions that are up.
func (t controlTree) openSessions() (out []*session) {
	for i := range t.s.sessions {
		if s := t.s.sessions[i].Load(); s != nil {
			out = append(out, s)
		}
	}
	return out
}

// digitFile returns a file that calls do when want is written to it.
func digitFile(want, usage string, do func(context.Context) error) *ctltree.File {
	return ctltree.Command(usage, func(ctx context.Context, word string) error {
		if word != want {
			return fmt.Errorf("write %s, nothing else: %w", want, syscall.EINVAL)
		}
		return do(ctx)
	})
}
