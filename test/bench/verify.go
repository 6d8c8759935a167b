package main

import (
	"context"
	"fmt"
	"io"
	"time"
)

// The verifying twin of a workload moves blocks of the same size with the same
// number in flight. It writes blocks that tell their place and version, and
// reads them back later: data that is lost, late, torn or misplaced shows. Twins
// are `rnbd bench --verify`, and fio with checksums for the front end.

// verifyTime is how long a verifying twin runs.
const verifyTime = 40 * time.Millisecond

// verify runs the twin of each workload of each target of ours.
func (s *site) verify(ctx context.Context, r *results, out io.Writer) error {
	for _, t := range s.targets {
		for _, w := range s.plan.loads[t.name] {
			if t.verify == nil {
				continue
			}
			err := t.verify(ctx, w, verifyTime)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			what := fmt.Sprintf("%s, %s", t.name, w.Name)
			if err != nil {
				r.errors = append(r.errors, fmt.Sprintf("verify %s: %v", what, err))
				fmt.Fprintf(out, "wrong data: %s: %v\n", what, err)
				continue
			}
			r.verified = append(r.verified, what)
		}
	}
	return nil
}
