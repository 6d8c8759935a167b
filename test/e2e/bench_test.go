package e2e

import (
	"path/filepath"
	"testing"

	"github.com/rnbd-go/rnbd/test/lab"
)

// A disk of this host is measured past the page cache, and written to only as
// long as no server has it open.
func TestBenchOfABlockDevice(t *testing.T) {
	l := lab.New(t)
	loop := loopDevice(t, filepath.Join(l.Image("disk.img", 8<<20), "disk.img"))
	write := []string{"bench", loop, "--rw", "randrw", "--depth", "4", "--time", "200ms", "--write", "--yes", "--verify"}
	rnbd(t, write...).want(t, 0, "direct", "Complete", "4k-randrw-d4")

	s := l.Server(lab.ServerOptions{Plugins: []string{"blockio"}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, loop, s)
	rnbd(t, write...).want(t, 5, loop, "without --write")
	rnbd(t, "bench", loop, "--depth", "1", "--time", "50ms").want(t, 0, "4k-randread-d1")
	if err := c.Unmap(d.Name, false); err != nil {
		t.Fatal(err)
	}
	rnbd(t, write...).want(t, 0)
}
