package faults

import (
	"errors"
	"syscall"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

func withMode(mode string) func(*controlpb.MapRequest) {
	return func(r *controlpb.MapRequest) { r.AccessMode = mode }
}

// TestADeviceMovesBetweenClients does what a live migration does, there and
// back: the second client maps the device beside the first, takes over when the
// first has no request left, and the first unmaps it under the load of the
// second. Each side judges what the other has written.
func TestADeviceMovesBetweenClients(t *testing.T) {
	l := lab.New(t)
	dir := l.Image("vm.img", 16<<20)
	s := l.Server(lab.ServerOptions{SearchPath: dir, Plugins: []string{"fileio"}})
	here, there := l.Client(lab.ClientOptions{}), l.Client(lab.ClientOptions{})
	device := l.Map(here, "vm.img", s, withMode("rw"))
	options := loadOptions{workers: 8, blocks: 64}
	w := startLoad(t, here, device.Name, options)
	for hop := range 2 {
		w.awaitProgress(200)
		if _, err := there.Map("vm.img", s, withMode("rw")); !errors.Is(err, syscall.EPERM) {
			t.Fatalf("hop %d: a second writer in mode rw: %v, want EPERM", hop, err)
		}
		next := l.Map(there, "vm.img", s, withMode("migration")) // under load
		third := l.Client(lab.ClientOptions{})
		if _, err := third.Map("vm.img", s, withMode("migration")); !errors.Is(err, syscall.EPERM) {
			t.Fatalf("hop %d: a third writer: %v, want EPERM", hop, err)
		}
		w.awaitProgress(100)
		w.end() // the guest stops
		options.history = w.h
		w = startLoad(t, there, next.Name, options) // and goes on
		w.awaitProgress(100)
		eventually(t, enough, "the first has unmapped it", func() bool { return here.Unmap(device.Name, false) == nil })
		w.awaitProgress(200)
		if users := serverDevice(t, s, "vm.img").Users; len(users) != 1 {
			t.Errorf("hop %d: %d users", hop, len(users))
		}
		here, there, device = there, here, next
	}
	w.stop() // reads every block once more
}
