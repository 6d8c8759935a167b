package server

import (
	"fmt"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

// A disk that hangs with many requests holds up its own device only, whoever else
// uses the plugin meanwhile.
func TestADiskThatHangsLeavesTheOthersOfItsSession(t *testing.T) {
	const devices = 16
	for _, tt := range []struct {
		name  string
		stuck int // requests on the disk that hangs
		ring  int // entries
		other int // requests that another session has stuck; -1: there is none
		busy  bool
	}{
		{"its session is alone and the ring is small", 40, 16, -1, false},
		{"another session has a request that hangs", 40, 1024, 1, false},
		{"another session is deep and hangs too", 40, 1024, 40, false},
		{"another session is at work, one request at a time", 40, 1024, 0, true},
		{"eight requests beside a session at work", 8, 1024, 0, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mem := newMemory()
			for n := range devices {
				mem.add(fmt.Sprint("vol", n), 1<<20)
			}
			mem.add("busy", 1<<20)
			mem.disks["vol0"].hung.Store(true)
			r := newRig(t, mem, func(c *Config) { c.Pumps, c.QueueDepth, c.RingEntries = 1, 64, tt.ring })
			i := r.connect("s")
			ids := make([]uint32, devices)
			for n := range ids {
				rsp, err := i.open(fmt.Sprint("vol", n), blk.ReadWrite)
				must(t, err)
				ids[n] = rsp.DeviceID
			}
			if tt.other >= 0 {
				other := r.connect("other")
				rsp, err := other.open("busy", blk.ReadWrite)
				must(t, err)
				mem.disks["busy"].hung.Store(tt.other > 0)
				for range tt.other {
					other.start(true, 512, ioMessage(rsp.DeviceID, blk.Read, 0, 0, 512))
				}
				if tt.busy {
					stop := make(chan struct{})
					done := make(chan struct{})
					go func() {
						defer close(done)
						for {
							select {
							case <-stop:
								return
							case <-other.start(true, 512, ioMessage(rsp.DeviceID, blk.Read, 0, 0, 512)):
							}
						}
					}()
					defer func() { close(stop); <-done }()
				}
			}
			for range tt.stuck {
				i.start(true, 512, ioMessage(ids[0], blk.Read, 0, 0, 512))
			}
			begin := time.Now()
			buf := make([]byte, 512)
			for range 20 {
				for _, id := range ids[1:] {
					if errno := i.rw(id, blk.Read, 0, buf); errno != blk.OK {
						t.Fatalf("read beside a disk that hangs: errno %d", errno)
					}
				}
			}
			if d := time.Since(begin); d > 5*time.Second {
				t.Errorf("300 reads of disks that answer took %s", d)
			}
		})
	}
}

// A mapping's requests reach the plugin in the order of their arrival, even if
// they had to wait.
func TestRequestsOfADeviceStayInOrder(t *testing.T) {
	mem := newMemory()
	mem.add("vol", 1<<20)
	mem.setHold(true)
	r := newRig(t, mem, func(c *Config) { c.Pumps, c.QueueDepth, c.RingEntries = 1, 64, 16 })
	i := r.connect("s")
	rsp, err := i.open("vol", blk.ReadWrite)
	must(t, err)
	var answers []<-chan int
	for n := range 48 {
		answers = append(answers, i.start(true, 512, ioMessage(rsp.DeviceID, blk.Read, 0, uint64(n), 512)))
	}
	eventually(t, "the ring has what it takes of one device", func() bool { return len(mem.requests()) == 4 })
	mem.setHold(false)
	for _, a := range answers {
		if errno := i.await(a); errno != blk.OK {
			t.Fatalf("errno %d", errno)
		}
	}
	for n, q := range mem.requests() {
		if q.Off != uint64(n)*512 {
			t.Fatalf("request %d is for byte %d", n, q.Off)
		}
	}
}
