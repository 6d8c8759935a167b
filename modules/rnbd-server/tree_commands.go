package server

import (
	"context"
	"fmt"
	"syscall"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/ctltree"
)

// tree builds the nodes.
type tree struct{ s *Server }

// open lists the sessions that are up.
func (t tree) open() (out []*session) {
	for i := range t.s.sessions {
		if s := t.s.sessions[i].Load(); s != nil {
			out = append(out, s)
		}
	}
	return out
}

// digit returns a file that calls do when want is written to it.
func digit(want, usage string, do func(context.Context) error) *ctltree.File {
	return ctltree.Command(usage, func(ctx context.Context, word string) error {
		if word != want {
			return fmt.Errorf("write %s, nothing else: %w", want, syscall.EINVAL)
		}
		return do(ctx)
	})
}
