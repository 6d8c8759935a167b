package faults

import (
	"bytes"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/control/controlpb"
	"github.com/rnbd-go/rnbd/test/lab"
)

func withMode(mode string) func(*controlpb.MapRequest) {
	return func(r *controlpb.MapRequest) { r.AccessMode = mode }
}

// TestADeviceMovesBetweenClients repeats the steps of a live migration, there
// and back: the second client maps the device beside the first, takes over when
// the first has no request left, and the first unmaps it under the load of the
// second. Each side judges the writes of the other.
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

// TestAWriteIsNotRepeatedAfterAnotherClients has the server carry out a write
// and loses its answer with the path. Then another client writes: the first
// write must not come back. Over another path it is answered; in a new session,
// which cannot know, it is refused.
func TestAWriteIsNotRepeatedAfterAnotherClients(t *testing.T) {
	for name, second := range map[string]bool{"another path is left": true, "no path is left": false} {
		t.Run(name, func(t *testing.T) {
			p := newPaths(t, lab.ServerOptions{}, "vm.img", second, withMode("migration"))
			there := p.lab.Client(lab.ClientOptions{})
			next := p.lab.Map(there, "vm.img", p.server, withMode("migration"))
			one, two := mustDial(t, p.client, p.device), mustDial(t, there, next.Name)
			p.policy("round-robin")
			got, value := make([]byte, loadBlock), byte(0)
			read := func() []byte {
				if _, err := two.ReadAt(got, 0); err != nil {
					t.Fatal(err)
				}
				return got
			}
			// unanswered writes with one client until an answer is lost.
			unanswered := func() (a []byte, answer chan error) {
				for range 20 {
					value++
					a, answer = bytes.Repeat([]byte{'a', value}, loadBlock/2), make(chan error, 1)
					go func() { _, err := one.WriteAt(a, 0); answer <- err }()
					eventually(t, enough, "the write is on the disk", func() bool { return bytes.Equal(read(), a) })
					select {
					case err := <-answer: // on the other path
						if err != nil {
							t.Fatal(err)
						}
					case <-time.After(200 * time.Millisecond):
						return a, answer
					}
				}
				t.Fatal("all answers come on the other path")
				return nil, nil
			}
			for round := range pick(3, 20) {
				p.awaitState(p.proxy.addr, "connected")
				p.proxy.holdAnswers()
				a, answer := unanswered()
				b := bytes.Repeat([]byte{'b', value}, loadBlock/2)
				if _, err := two.WriteAt(b, 0); err != nil {
					t.Fatalf("round %d: the other client's write: %v", round, err)
				}
				p.proxy.cut()
				p.proxy.release()
				var err error
				select {
				case err = <-answer:
				case <-time.After(enough):
					t.Fatalf("round %d: no answer", round)
				}
				if second != (err == nil) {
					t.Errorf("round %d: the write whose answer was lost: %v", round, err)
				}
				if !bytes.Equal(read(), b) {
					t.Fatalf("round %d: a, b, then %q", round, got[:2])
				}
				if _, err := one.WriteAt(a, loadBlock); err != nil {
					t.Fatalf("round %d: the next write: %v", round, err)
				}
			}
		})
	}
}
