package devices

import (
	"os"
	"path/filepath"
	"testing"
	"time"
)

// testClientStopped: an orderly end takes the disks away that nobody uses, and
// leaves the others to the next daemon.
func testClientStopped(t *testing.T, s *stack) {
	used, usedNode := s.disk(t, s.image(t, 64<<20))
	idle, idleNode := s.disk(t, s.image(t, 64<<20))
	f, err := os.Open(usedNode) // load does not use it between its passes
	must(t, err)
	defer f.Close()
	end := load(t, usedNode, "2m")
	eventually(t, "load", func() bool { d, err := s.client.Device(used.Name); return err == nil && d.TxSectors > 20 })
	must(t, s.client.Stop())
	if _, err := os.Stat("/sys/block/" + filepath.Base(usedNode)); err != nil {
		t.Errorf("the disk in use went with the daemon: %v", err)
	}
	s.leftOver(t, idleNode)
	time.Sleep(time.Second)
	must(t, s.client.Start())
	eventually(t, "the disk is served again", func() bool {
		now, err := s.client.Device(used.Name)
		return err == nil && now.Endpoint == usedNode && now.State == "open" && now.LastError == ""
	})
	end()
	if d, err := s.client.Device(idle.Name); err == nil {
		t.Errorf("the disk that nobody used is there: %v", d)
	}
}
