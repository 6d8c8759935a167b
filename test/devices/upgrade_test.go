package devices

import (
	"testing"
	"time"
)

// testUpgrades hands disks under load to the next process of client and server.
// Each disk keeps its node, and no request fails.
func testUpgrades(t *testing.T, s *stack) {
	d, node := s.disk(t, s.image(t, 64<<20), queueing)
	end := load(t, node, "2m")
	var client, server []time.Duration
	for range pick(1, 20) {
		awaitIO(t, node)
		reply, err := s.client.Upgrade("")
		must(t, err)
		client = append(client, time.Duration(reply.PauseUs)*time.Microsecond)
		awaitIO(t, node)
		reply, err = s.server.Upgrade("")
		must(t, err)
		server = append(server, time.Duration(reply.PauseUs)*time.Microsecond)
	}
	awaitIO(t, node)
	end()
	eventually(t, "the disk is open at "+node, func() bool {
		now, err := s.client.Device(d.Name)
		return err == nil && now.Endpoint == node && now.State == "open"
	})
	t.Logf("pauses of the client's upgrades: %v, of the server's: %v", client, server)
}
