package faults

import (
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/test/lab"
	"github.com/rnbd-go/rnbd/test/slowdisk"
)

// smallLoad overwrites the same few blocks all the time.
var smallLoad = loadOptions{workers: 8, blocks: 8, maxBlocks: 4, reads: 10}

// loseFirst makes the first path the only one, holds what the client sends on
// it, and lets it fail over to the second. From then on the old requests are
// in the proxy.
func loseFirst(t *testing.T, p *paths, w *load, between func()) {
	t.Helper()
	first, second := p.proxy.addr, p.server.Addrs[1]
	p.awaitState(first, "connected")
	if path := p.to(second); path == nil {
		p.change("add", second)
	}
	p.change("disconnect", second)
	w.awaitProgress(50)
	holdWrites(t, p, w)
	p.change("reconnect", second)
	between()
	p.proxy.cut()
}

// holdWrites holds the proxy with at least one write of a block in it. Requests
// of the same blocks wait for one another, so it may catch nothing but reads:
// then it tries again, long before a heartbeat is missed.
func holdWrites(t *testing.T, p *paths, w *load) {
	t.Helper()
	for range 50 {
		p.proxy.holdRequests()
		for end := time.Now().Add(300 * time.Millisecond); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if p.proxy.stuckBytes() > loadBlock {
				time.Sleep(20 * time.Millisecond)
				return
			}
		}
		p.proxy.release()
		w.awaitProgress(10)
	}
	t.Fatal("no write is on its way")
}

// TestBytesOfALostPathThatArriveLate delivers the writes of a lost path after
// the client has written newer data over the other one.
func TestBytesOfALostPathThatArriveLate(t *testing.T) {
	p := newPaths(t, lab.ServerOptions{}, "disk.img", false)
	w := startLoad(t, p.client, p.device, smallLoad)
	for range pick(3, 50) {
		loseFirst(t, p, w, func() {})
		w.awaitProgress(300) // all blocks are overwritten
		w.still(func() {
			p.proxy.release()
			time.Sleep(50 * time.Millisecond)
		})
	}
	w.stop()
	t.Logf("%d requests judged, %d dangerous bytes in the last round", w.ops.Load(), p.proxy.stuckBytes())
}

// TestBytesOfALostPathThatTheServerHasNotRead leaves them in the socket of a
// server that does not run, until the client has failed over.
func TestBytesOfALostPathThatTheServerHasNotRead(t *testing.T) {
	p := newPaths(t, lab.ServerOptions{}, "disk.img", false)
	w := startLoad(t, p.client, p.device, smallLoad)
	for range pick(3, 50) {
		loseFirst(t, p, w, func() {
			if err := p.server.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			p.proxy.release()
			time.Sleep(50 * time.Millisecond) // it is all in the server's socket
		})
		time.Sleep(50 * time.Millisecond) // and so is the other path's
		if err := p.server.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		w.awaitProgress(50)
		w.still(func() { time.Sleep(20 * time.Millisecond) })
	}
	w.stop()
	t.Logf("%d requests judged", w.ops.Load())
}

// TestWritesOfALostPathThatAreInTheDisk fails over while the disk holds writes:
// they must have ended before newer ones of the same blocks begin.
func TestWritesOfALostPathThatAreInTheDisk(t *testing.T) {
	disk := slowdisk.New(t, 4<<20)
	p := newPaths(t, lab.ServerOptions{Plugins: []string{"blockio"}}, disk.Loop(), true)
	w := startLoad(t, p.client, p.device, smallLoad)
	disk.SetDelay(time.Millisecond)
	for range pick(4, 20) {
		p.awaitState(p.proxy.addr, "connected")
		w.awaitProgress(50)
		disk.HoldWrites()
		disk.WaitHeld(1)
		time.Sleep(20 * time.Millisecond)
		at := time.Now()
		p.proxy.cut()
		time.Sleep(200 * time.Millisecond)
		disk.Release()
		w.awaitProgress(100)
		inOrder(t, disk.History(), at)
	}
	w.stop()
	t.Logf("%d requests judged", w.ops.Load())
}
