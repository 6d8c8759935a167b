package faults

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// The paths of a session notice the end of a server at different times: TCP is
// told, RoCEv2 asks its peer once per second. A device that is idle opens again
// all the same when the server is back before all of them have noticed.
func TestServerThatIsBackBeforeEachPathKnowsThatItWasAway(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("disk.img", 16<<20)
	const port = ":4791"
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Extra: []string{"--listen", "rocev2://" + lab.LoopbackAddr(1) + port}})
	c := l.Client(lab.ClientOptions{})
	d := l.Map(c, "disk.img", s, withLoss("queue:60s"), func(r *controlpb.MapRequest) {
		r.Paths = []string{s.Addrs[0], lab.LoopbackAddr(2) + "@" + lab.LoopbackAddr(1) + port + "%rocev2"}
	})
	o := &outage{t: t, lab: l, server: s, client: c, device: d.Name, nbd: mustDial(t, c, d.Name)}
	o.mustWork(1)
	for n := range byte(pick(1, 12)) {
		o.kill()
		time.Sleep(time.Second)
		o.start()
		time.Sleep(time.Duration(n) * 300 * time.Millisecond)
		at := time.Now()
		o.mustWork(n + 2)
		if took := time.Since(at); took > enough {
			t.Errorf("restart %d: the first request took %v", n, took)
		}
		o.awaitState("open")
	}
}
