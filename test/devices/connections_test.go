package devices

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// testSeveralConnections: nbd.ko gives a connection up when one of its requests
// is late, and sends its requests on another one. Users see a pause.
func testSeveralConnections(t *testing.T, s *stack) {
	d, node := s.disk(t, s.image(t, 64<<20), queueing, options("timeout", "3", "connections", "2"))
	end := load(t, node, "2m")
	for _, event := range []struct {
		name string
		do   func(t *testing.T, s *stack, node string)
	}{
		{"late requests", lateRequests},
		{"plugin killed", killFrontend},
		{"client killed", killClient},
	} {
		for range pick(1, 20) {
			awaitIO(t, node)
			event.do(t, s, node)
			awaitIO(t, node)
		}
		if n := connections(t, node); n != 2 {
			t.Errorf("%s: %d connections", event.name, n)
		}
	}
	end()
	if strings.Contains(s.client.Log(), "fewer connections") {
		t.Error("a connection was not replaced")
	}
	eventually(t, "the disk is at its node", func() bool {
		now, err := s.client.Device(d.Name)
		return err == nil && now.Endpoint == node
	})
}

// connections are as many as the disk has queues.
func connections(t *testing.T, node string) int {
	t.Helper()
	queues, err := os.ReadDir(filepath.Join("/sys/block", filepath.Base(node), "mq"))
	must(t, err)
	return len(queues)
}

// lateRequests have no answer within the time-out.
func lateRequests(t *testing.T, s *stack, _ string) {
	const given = "the kernel has closed its connection"
	before := strings.Count(s.client.Log(), given)
	must(t, s.server.Kill())
	time.Sleep(25 * time.Second) // time-outs of both connections, one after the other
	must(t, s.server.Start())
	eventually(t, "connections given up, and others in their place", func() bool {
		return strings.Count(s.client.Log(), given) >= before+2
	})
}
