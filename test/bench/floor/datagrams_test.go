package main

import (
	"bytes"
	"encoding/binary"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// A message comes whole, in packets of which each has the checksum of its header and
// payload.
func TestDatagrams(t *testing.T) {
	a, b, err := datagramSockets()
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	defer b.Close()
	for _, fd := range []uintptr{a.Fd(), b.Fd()} {
		if err := unix.SetNonblock(int(fd), true); err != nil {
			t.Fatal(err)
		}
	}
	got, came := make([]byte, 100_000), 0
	from, err := newDatagrams(int(a.Fd()), true, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	to, err := newDatagrams(int(b.Fd()), true, func([]byte) ([]byte, bool) { return got, true }, func(n int) { came = n })
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Repeat([]byte{1, 2, 3, 5}, len(got)/4)
	send := func() {
		from.post(wireAnswer, want, &shm.SQE{Tag: 7, Op: blk.Read, Len: uint32(len(want))})
		from.flush()
	}
	send()
	for range 1000 {
		to.Poll()
	}
	if came != len(want) || to.open || !bytes.Equal(got, want) {
		t.Fatalf("%d of %d bytes came, equal: %t", came, len(want), bytes.Equal(got, want))
	}
	send()
	raw := make([]byte, packetStage)
	n, err := unix.Read(int(b.Fd()), raw)
	if want := firstPackets * (packetHeader + packetMTU); err != nil || n != want {
		t.Fatalf("the first datagram has %d bytes, %v; want %d", n, err, want)
	}
	for packet := raw[:n]; len(packet) > 0; packet = packet[packetHeader+packetMTU:] {
		head, payload := packet[:packetHeader], packet[packetHeader:][:packetMTU]
		if sum := binary.LittleEndian.Uint32(head[sumAt:]); sum == 0 || sum != sumOf(head, payload) {
			t.Errorf("the checksum %#x is not that of the packet", sum)
		}
	}
}
