package faults

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/rnbdwire"
)

// A client that sends arbitrary messages costs its neighbours no more than an
// honest one that connects and asks as often. The p99 of another client of the
// server stays within twice of its value beside the honest one, in one of
// several measurements, since other programs take the processors away too.
func TestHostileClientsLeaveTheirNeighbours(t *testing.T) {
	const slice = 100 * time.Millisecond
	for _, fabric := range []string{"iwarp", "rocev2"} {
		t.Run(fabric, func(t *testing.T) {
			s, victim, a := underAttack(t, fabric)
			hostile := append(append(transportTricks(), placeTricks()...), messageTricks()...)
			honest := []trick{{"session info", func(p *attack, cid int) {
				msg := make([]byte, rnbdwire.SessInfoSize)
				rnbdwire.SessInfoFields{Version: rnbdwire.Version}.Put(msg)
				p.request(cid, 0, true, rnbdwire.SessInfoRspSize, msg)
			}}}
			next := 0
			use := func(tricks []trick) { // for a slice, with a new path for every 20
				p := a.connect().join()
				defer func() { p.leave() }()
				for stop := after(slice); !stop(); next++ {
					if p.downs > 0 || next%20 == 19 {
						p.leave()
						p = a.connect().join()
					}
					tricks[next%len(tricks)].do(p, next%2)
					p.settle()
				}
			}
			measure := func(tricks []trick) []time.Duration {
				var quit atomic.Bool
				took := make(chan []time.Duration, 1)
				var running sync.WaitGroup
				running.Go(func() { took <- victim.run(quit.Load) })
				defer running.Wait()
				defer quit.Store(true)
				use(tricks)
				quit.Store(true)
				return <-took
			}
			measure(honest) // warm up
			for try := 1; ; try++ {
				var beside, attacked []time.Duration
				for range 5 {
					beside = append(beside, measure(honest)...)
					attacked = append(attacked, measure(hostile)...)
				}
				ratio := float64(p99(attacked)) / float64(p99(beside))
				t.Logf("beside an honest client: %s; beside an attack: %s: %.2f", figures(beside), figures(attacked), ratio)
				if ratio <= 2 {
					break
				}
				if try == 8 {
					t.Fatalf("in %d measurements the p99 was more than twice as long beside the attack", try)
				}
			}
			if gone, err := s.Exited(); gone {
				t.Fatalf("the server ended: %v", err)
			}
			t.Logf("%d requests of the neighbours, %d answers to them", next, a.heard)
		})
	}
}

func p99(d []time.Duration) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return d[len(d)*99/100]
}
