//go:build linux && cgo && ibverbs

package ibverbs

import (
	"fmt"
	"log/slog"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// The C side, with a device that refuses requests.
func TestEveryQueuePairThatIsRefusedIsReported(t *testing.T) {
	bin := filepath.Join(t.TempDir(), "post")
	build := exec.Command("gcc", "-Wall", "-Wextra", "-Werror", "-o", bin, "post.c")
	build.Dir = "testdata"
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	out, err := exec.Command(bin).Output()
	if err != nil {
		t.Fatal(err)
	}
	turns := strings.Split(strings.TrimPrefix(string(out), "turn\n"), "turn\n")
	var all strings.Builder
	for i := range 256 {
		fmt.Fprintf(&all, "%d 22\n", 256+i)
	}
	for i := range 256 {
		fmt.Fprintf(&all, "%d 12\n", i)
	}
	for i, tt := range []struct{ name, want string }{
		{"sends of several queue pairs", "11 12\n13 12\n14 12\n"},
		{"receives of several queue pairs", "21 22\n23 22\n24 22\n"},
		{"both", "21 22\n23 22\n24 22\n11 12\n13 12\n14 12\n"},
		{"none", ""},
		{"all that a turn can have", all.String()},
	} {
		if i >= len(turns) || turns[i] != tt.want {
			t.Errorf("%s: reported\n%swant\n%s", tt.name, turns[min(i, len(turns)-1)], tt.want)
		}
	}
}

func TestEveryQueuePairThatIsRefusedEnds(t *testing.T) {
	d := &Device{f: &Fabric{cfg: Config{Logger: slog.New(slog.DiscardHandler)}}, qps: map[uint32]*qp{}}
	c := &compQueue{dev: d, c: new(cCQ)}
	check(t, c.OpenFD())
	c.slots.Store(new([]atomic.Pointer[qp]))
	var all []*qp
	for range 4 {
		q := newQP(d, nil, c, verbs.QPConfig{SendQueue: 1, RecvQueue: 1})
		if err := c.addQP(q); err != nil {
			t.Fatal(err)
		}
		q.state.Store(uint32(phaseUp))
		all = append(all, q)
	}
	for i, q := range []*qp{all[0], all[2], all[2], all[3]} {
		set(&c.c.failures[i].wr_id, q.slot)
		c.c.failures[i].err = 12
	}
	c.c.nfailures = 4
	c.postFailed()
	for i, q := range all {
		if ends := !q.inPhase(phaseUp); ends != (i != 1) {
			t.Errorf("queue pair %d ends: %v", i, ends)
		}
	}
	if c.c.nfailures != 0 {
		t.Errorf("%d failures are left", c.c.nfailures)
	}
}

// set stores v in a field of a C type. Tests cannot name such types.
func set[T ~uint64](field *T, v uint64) { *field = T(v) }
