package server

import (
	"errors"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

func TestR129_AccessModes(t *testing.T) {
	const ro, rw, mig = blk.ReadOnly, blk.ReadWrite, blk.Migration
	for _, c := range []struct {
		name string
		held []blk.AccessMode
		ask  blk.AccessMode
		want error
	}{
		{"first rw", nil, rw, nil},
		{"second rw", []blk.AccessMode{rw}, rw, syscall.EPERM},
		{"ro beside rw", []blk.AccessMode{rw}, ro, nil},
		{"many ro", []blk.AccessMode{ro, ro, ro}, ro, nil},
		{"rw beside ro", []blk.AccessMode{ro}, rw, nil},
		{"migration after rw", []blk.AccessMode{rw}, mig, nil},
		{"two migrations", []blk.AccessMode{mig}, mig, nil},
		{"rw after migration", []blk.AccessMode{mig}, rw, syscall.EPERM},
		{"third writer", []blk.AccessMode{rw, mig}, mig, syscall.EPERM},
		{"unknown mode", nil, 7, syscall.EINVAL},
	} {
		t.Run("R-129 "+c.name, func(t *testing.T) {
			w := writerCounts{}
			id := nodeID{dev: 1}
			for _, m := range c.held {
				must(t, w.admit(id, m))
			}
			if err := w.admit(id, c.ask); !errors.Is(err, c.want) {
				t.Fatalf("got %v, want %v", err, c.want)
			}
		})
	}
}

func TestWritersAreForgotten(t *testing.T) {
	w := writerCounts{}
	id := nodeID{dev: 1}
	must(t, w.admit(id, blk.ReadWrite))
	must(t, w.admit(id, blk.Migration))
	w.release(id, blk.ReadWrite)
	must(t, w.admit(id, blk.Migration))
	w.release(id, blk.Migration)
	w.release(id, blk.Migration)
	if len(w) != 0 {
		t.Fatalf("left over: %v", w)
	}
}
