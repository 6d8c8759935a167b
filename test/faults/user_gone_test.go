package faults

import (
	"bytes"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// TestAWriteOfAUserThatHasGoneIsNotOvertaken ends an NBD client whose write is in a
// slow disk. The write of the next client to the same block waits for it, so the block
// keeps the later bytes.
func TestAWriteOfAUserThatHasGoneIsNotOvertaken(t *testing.T) {
	for _, target := range slowTargets {
		t.Run(target.name, func(t *testing.T) {
			disk := slowdisk.New(t, 4<<20)
			search, device := target.serve(disk)
			l := lab.New(t)
			s := l.Server(lab.ServerOptions{SearchPath: search, Plugins: []string{target.plugin}})
			c := l.Client(lab.ClientOptions{})
			d := l.Map(c, device, s)
			older, later := bytes.Repeat([]byte{'O'}, loadBlock), bytes.Repeat([]byte{'N'}, loadBlock)
			first := mustDial(t, c, d.Name)
			disk.HoldWrites()
			go first.WriteAt(older, 0)
			disk.WaitHeld(1)
			first.Close()
			next := mustDial(t, c, d.Name)
			written := make(chan error, 1)
			go func() {
				_, err := next.WriteAt(later, 0)
				written <- err
			}()
			if _, err := next.ReadAt(make([]byte, loadBlock), 16*loadBlock); err != nil { // other blocks are served
				t.Error(err)
			}
			select {
			case err := <-written:
				t.Errorf("the later write is answered (%v) while the older one is in the disk", err)
				written <- err
			case <-time.After(200 * time.Millisecond):
			}
			disk.Release()
			if err := <-written; err != nil {
				t.Fatal(err)
			}
			if err := next.Flush(); err != nil {
				t.Error(err)
			}
			eventually(t, enough, "the disk has the later write", func() bool { return bytes.Equal(disk.Bytes(0, loadBlock), later) })
		})
	}
}
