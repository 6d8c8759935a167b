package kernelvm

import (
	"testing"
	"time"
)

// The other end of our ibverbs is our rocev2 on the host, because a link has to
// lie between the two to be cut: once as the client, once as the server, each
// with an idle session on the other link.
//
// Only in the long form: about one run of three fails because the guest's
// connection manager answers a request of ours later than the 10 s of a
// client's patience. The cause is not known.
func TestIBVerbs_LinkLossAndIdle(t *testing.T) {
	longForm(t)
	g := guest(t)
	rocev2.prepare(t, g)
	mixed := func(client, server column) *bench {
		s := &ourServer{at: server.ours(g), fabric: server.fabric, addr: func(link int) string { return server.server(g, link) }}
		s.Start(t)
		c := &ourClient{at: client.ours(g), fabric: client.fabric, addr: func(link int) string { return client.client(g, link) }}
		c.start(t)
		return &bench{cell: cell{column: column{fabric: client.fabric + " to " + server.fabric}, from: ours, to: ours, invalidate: true}, g: g, c: c, s: s}
	}
	all := []*lossy{lossyOn(t, mixed(ibverbs, rocev2)), lossyOn(t, mixed(rocev2, ibverbs))}
	begin := time.Now()
	time.Sleep(3 * time.Second)
	for round := range 2 {
		if err := g.CutLink(0, true); err != nil {
			t.Fatal(err)
		}
		defer g.CutLink(0, false)
		for _, l := range all {
			eventually(t, 60*time.Second, l.b.String()+": one path is lost", func() bool { return l.connected() == 1 })
		}
		time.Sleep(time.Duration(1+5*round) * time.Second) // short, and longer than an attempt to connect
		if err := g.CutLink(0, false); err != nil {
			t.Fatal(err)
		}
		for _, l := range all {
			eventually(t, 60*time.Second, l.b.String()+": both paths are back", func() bool { return l.connected() == 2 })
		}
	}
	if rest := 42*time.Second - time.Since(begin); rest > 0 {
		time.Sleep(rest)
	}
	endAll(t, all)
}
