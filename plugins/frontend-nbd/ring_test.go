package main

import (
	"io"
	"net"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/nbdwire"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// Devices without answers to their requests, as those of a lost server, leave
// room in the ring for the others, and get their answers in the end.
func TestQueue_DevicesThatHangLeaveRoomInTheRing(t *testing.T) {
	const hanging, each = 4, 32
	ring, err := shm.NewHeapRing(64)
	if err != nil {
		t.Fatal(err)
	}
	q, err := newQueue(ring.Submitter(), quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.close(); ring.Close() })
	var peers []net.Conn
	for i := range uint32(hanging + 1) {
		d := newDisk(testLimits(1<<20), each, 4096)
		e, err := newExport(spec{Index: i, Name: "x", Limits: d.limits, Arena: d.arena, SlotSize: 4096, Slots: each})
		if err != nil {
			t.Fatal(err)
		}
		e.addOpener()
		fd, peer := pair(t)
		t.Cleanup(func() { peer.Close() })
		peers = append(peers, peer)
		q.addConn(newConn(fd, "test", handshakeResult{exp: e}, e.assignShare([]*queue{q})))
	}
	host := ring.Completer()
	var held []uint64
	step := func() (answered int) { // the host answers the last device only
		q.Poll()
		var es [64]shm.SQE
		for _, e := range es[:host.Pop(es[:])] {
			if e.Device == hanging {
				host.Push(&shm.CQE{Tag: e.Tag})
				answered++
			} else {
				held = append(held, e.Tag)
			}
		}
		host.Publish()
		q.Poll()
		return answered
	}
	for _, peer := range peers[:hanging] {
		for k := range uint64(each) {
			if _, err := peer.Write(command(nbdwire.CmdRead, 0, k, 4096*k, 4096)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for range 20 {
		step()
	}
	if len(held) == 0 || len(held) == hanging*each {
		t.Fatalf("%d requests reach a ring of 64", len(held))
	}
	reply := make([]byte, nbdwire.SimpleSize+4096)
	for k := range uint64(10) {
		peers[hanging].Write(command(nbdwire.CmdRead, 0, k, 0, 4096))
		n := 0
		for range 20 {
			n += step()
		}
		if n != 1 {
			t.Fatalf("request %d of the device that works reaches the host %d times", k, n)
		}
		if _, err := io.ReadFull(peers[hanging], reply); err != nil {
			t.Fatal(err)
		}
	}
	answered := 0
	for range 1000 {
		for _, tag := range held {
			host.Push(&shm.CQE{Tag: tag})
			answered++
		}
		held = held[:0]
		step()
	}
	if answered != hanging*each || len(q.backlog) != 0 {
		t.Errorf("%d of %d requests reached the host in the end, %d devices wait", answered, hanging*each, len(q.backlog))
	}
}
