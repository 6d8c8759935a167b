package nemesis

import (
	"os"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/nbdclient"
)

// One network is dead, and nobody has noticed. The server restarts at once, and
// the other network alone is enough to go on.
func TestServerRestartsWhileOneNetworkIsDead(t *testing.T) {
	if !rooted(t) {
		t.Skip("needs namespaces")
	}
	const limit = 20 * time.Second // a path that does not answer is dialled for 30
	for _, c := range []struct {
		name    string
		fabrics [2]string
		loaded  bool
		dead    time.Duration // of the network, before the restart
	}{
		{"the device is idle", [2]string{"iwarp", "iwarp"}, false, 0},
		{"requests are under way", [2]string{"iwarp", "iwarp"}, true, 300 * time.Millisecond},
		{"the dead network is of RoCEv2", [2]string{"iwarp", "rocev2"}, true, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.loaded && os.Getenv("RNBD_LONG") == "" {
				t.Skip("in the long form")
			}
			w, err := build(t, Setup{Fabrics: c.fabrics, Engine: "uring", Loss: "queue:60s", QueueDepth: 64, ChunkSize: 128 << 10, Policy: "round-robin"}, true)
			t.Cleanup(w.close)
			if err != nil {
				t.Fatal(err)
			}
			ask := func(what string) {
				t.Helper()
				buf := make([]byte, 4096)
				at := time.Now()
				if err := w.answers(fastDevice, at.Add(limit), func(n *nbdclient.Client) error {
					_, err := n.ReadAt(buf, 0)
					return err
				}); err != nil {
					t.Fatalf("%s: %v", what, err)
				}
				t.Logf("%s: answered after %v", what, time.Since(at).Round(time.Millisecond))
			}
			ask("before")
			var l *load
			if c.loaded {
				l = w.startLoad(fastDevice, 1)
			}
			cut := &Fault{Kind: "cut", Path: 1}
			if err := w.begin(cut); err != nil {
				t.Fatal(err)
			}
			time.Sleep(c.dead)
			if err := w.restartServer(nil); err != nil {
				t.Fatal(err)
			}
			ask("with one network")
			if err := w.end(cut); err != nil {
				t.Fatal(err)
			}
			if l != nil {
				if err := l.end(time.Now().Add(limit)); err != nil {
					t.Error(err)
				}
				if err := l.h.Judge(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}
