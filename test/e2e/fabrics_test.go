package e2e

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

// One session with a path over TCP and one over UDP: requests go over both,
// and over either when the other is taken away.
func TestPathsOfTwoFabricsInOneSession(t *testing.T) {
	lab.Tool(t, "fio")
	l := lab.New(t)
	dir := l.Image("disk.img", deviceSize)
	_, port, err := net.SplitHostPort(freeAddr(t))
	if err != nil {
		t.Fatal(err)
	}
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}, Extra: []string{"--listen", "rocev2://" + lab.LoopbackAddr(1) + ":" + port}})
	c := l.Client(lab.ClientOptions{Extra: []string{"--policy", "round-robin", "--loss", "queue:30s"}})
	d := l.Map(c, "disk.img", s, func(r *controlpb.MapRequest) {
		r.Session = "mixed"
		r.Paths = []string{s.Addrs[0], lab.LoopbackAddr(2) + "@" + lab.LoopbackAddr(1) + ":" + port + "%rocev2"}
	})
	ids := map[string]uint32{}
	for _, p := range sessionsOf(t, c)[0].Paths {
		ids[p.Fabric] = p.Id
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { // takes one path after the other away while fio verifies
		for _, fabric := range []string{"rocev2", "iwarp", "rocev2", "iwarp"} {
			select {
			case <-stop:
				return
			case <-time.After(300 * time.Millisecond):
			}
			flap(t, c, ids[fabric])
		}
	})
	fioVerifies(t, 1, c.URI(d.Name), deviceSize, "--time_based", "--runtime=3")
	close(stop)
	wg.Wait()
	for _, p := range sessionsOf(t, c)[0].Paths {
		if p.RxBytes < 1<<20 || p.TxBytes < 1<<20 {
			t.Errorf("path over %s carried %d and %d bytes", p.Fabric, p.RxBytes, p.TxBytes)
		}
	}
}

// flap disconnects a path and connects it again.
func flap(t *testing.T, c *lab.Client, id uint32) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if _, err := c.API.DisconnectPath(ctx, &controlpb.PathRequest{Session: "mixed", Id: id}); err != nil {
		t.Errorf("disconnect: %v", err)
	}
	time.Sleep(100 * time.Millisecond)
	if _, err := c.API.ReconnectPath(ctx, &controlpb.PathRequest{Session: "mixed", Id: id}); err != nil {
		t.Errorf("reconnect: %v", err)
	}
}

// freeAddr is an address on loopback that nobody listens on now.
func freeAddr(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
