package rtrs

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Memory may be unmapped when Region.Close has returned, whatever the server
// goes on writing to it.
func TestRegionMayBeUnmappedWhileTheServerWritesToIt(t *testing.T) {
	held := make(heldRequests, 8)
	c, s, _ := openScripted(t, held.hold(false))
	for range 10 {
		mem, err := unix.Mmap(-1, 0, 1<<16, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		r, err := c.Register(mem)
		if err != nil {
			t.Fatal(err)
		}
		var place *scriptedRequest
		eventually(t, "a request is served", func() bool { // the last round has ended the path
			if c.on(0, func(q *Queue) error { return q.Read(1, Data{r, 0, 4096}, []byte("u")) }) != nil {
				return false
			}
			place = held.next(t)
			place.answer(0)
			return c.next().errno == 0
		})
		writes := func() {
			for range 4 {
				s.do(func() {
					for range 8 {
						place.conn.post(verbs.SendWR{Op: verbs.OpWrite, RemoteAddr: place.Desc.Addr, RKey: place.Desc.Key}, make([]byte, 4096))
					}
				})
			}
		}
		writes()
		done := make(chan struct{})
		go func() { defer close(done); writes() }()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		if err := unix.Munmap(mem); err != nil {
			t.Fatal(err)
		}
		<-done
		writes()
	}
}
