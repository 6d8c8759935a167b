package main

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/shm"
)

// A message has the checksum of its header and payload, and is found to have it.
func TestSums(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	defer unix.Close(fds[1])
	from, to := newStream(fds[0], wireAnswer), newStream(fds[1], wireAnswer)
	from.sums, to.sums = true, true
	got, came := make([]byte, 100_000), 0
	to.begin = func([]byte) ([]byte, bool) { return got, true }
	to.came = func(n int) { came = n }
	want := bytes.Repeat([]byte{1, 2, 3, 5}, len(got)/4)
	from.post(wireAnswer, want, &shm.SQE{Tag: 7, Op: blk.Read, Len: uint32(len(want))})
	for range 1000 {
		from.Poll()
		to.Poll()
	}
	if came != len(want) || !bytes.Equal(got, want) {
		t.Fatalf("%d of %d bytes came, equal: %t", came, len(want), bytes.Equal(got, want))
	}
	before := to.sum
	if to.want == 0 || before != to.want {
		t.Errorf("the checksum is %#x, %#x was sent", before, to.want)
	}
	want[99_999]++
	from.post(wireAnswer, want, &shm.SQE{Tag: 7, Op: blk.Read, Len: uint32(len(want))})
	for range 1000 {
		from.Poll()
		to.Poll()
	}
	if to.want == before || to.sum != to.want {
		t.Errorf("with another last byte %#x, %#x was sent, before %#x", to.sum, to.want, before)
	}
}
