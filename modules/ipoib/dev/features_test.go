package dev

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// TestIP23_LRO: TCP packets are joined for the kernel, until that is turned off.
// The bytes are the same.
func TestIP23_LRO(t *testing.T) {
	a, b, _, ib := pair(t)
	for _, addr := range []string{"192.168.50.2:7001", "[fd50::2]:7001"} {
		before := ib.Stats().RxJoined
		if err := transfer(t, a, b, addr, 8<<20); err != nil {
			t.Fatal(err)
		}
		if ib.Stats().RxJoined == before {
			t.Errorf("%s: no packet was joined", addr)
		}
	}
	if err := ib.SetLRO(false); err != nil || ib.Features().LRO {
		t.Fatalf("LRO off: %v, features %+v", err, ib.Features())
	}
	before := ib.Stats().RxJoined
	if err := transfer(t, a, b, "192.168.50.2:7002", 1<<20); err != nil {
		t.Fatal(err)
	}
	if n := ib.Stats().RxJoined - before; n != 0 {
		t.Errorf("%d packets were joined", n)
	}
}

// TestIP24_LRONeedsChecksums: and neither is there in connected mode.
func TestIP24_LRONeedsChecksums(t *testing.T) {
	a, _ := hosts(t, 4200)
	i := a.open(Config{})
	if want := (Features{true, true, true, true}); i.Features() != want {
		t.Errorf("features %+v", i.Features())
	}
	if err := i.SetRxChecksum(false); err != nil || i.Features().LRO || i.Features().RxChecksum {
		t.Errorf("checksums off: %v, features %+v", err, i.Features())
	}
	if err := i.SetLRO(true); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("LRO without checksums: %v", err)
	}
	if err := errors.Join(i.SetRxChecksum(true), i.SetLRO(true)); err != nil || !i.Features().LRO {
		t.Errorf("both on: %v", err)
	}
	if err := i.SetMode(Connected); err != nil {
		t.Fatal(err)
	}
	if (i.Features() != Features{}) || !errors.Is(i.SetLRO(true), unix.EOPNOTSUPP) || !errors.Is(i.SetRxChecksum(true), unix.EOPNOTSUPP) {
		t.Errorf("in connected mode: features %+v", i.Features())
	}
	if err := i.SetMode(Datagram); err != nil || !i.Features().LRO {
		t.Errorf("in datagram mode again: %v, features %+v", err, i.Features())
	}
}

// TestIP26_Moderation: datagrams that wait are taken together.
func TestIP26_Moderation(t *testing.T) {
	a, _, _, ib := pair(t)
	var qp verbs.DatagramQP
	var err error
	a.Do(func() { qp, err = a.fabric.OpenDatagrams(verbs.DatagramConfig{Local: portA, QKey: DefaultQKey}) })
	if err != nil {
		t.Fatal(err)
	}
	defer qp.Close()
	// perWakeup sends 50 datagrams, 1 ms apart, and returns how many were taken at once.
	perWakeup := func(c Coalescing) float64 {
		t.Helper()
		if err := ib.SetRxCoalescing(c); err != nil {
			t.Fatal(err)
		}
		before := ib.Stats()
		for range 50 {
			if _, err := qp.Send([]verbs.Datagram{{Payload: []byte{0x12, 0x34, 0, 0}, Peer: portB, QPN: ib.Address().QPN(), QKey: DefaultQKey}}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}
		eventually(t, "all have come", func() bool { return ib.Stats().RxUnknownType == before.RxUnknownType+50 })
		after := ib.Stats()
		return 50 / float64(after.RxWakeups-before.RxWakeups)
	}
	eventually(t, "more datagrams are taken at once", func() bool { // a busy host takes several at once by itself
		plain, one, moderated := perWakeup(Coalescing{}), perWakeup(Coalescing{Frames: 1, Wait: time.Second / 20}), perWakeup(Coalescing{Frames: 64, Wait: time.Second / 20})
		t.Logf("datagrams at once: %.1f, with 1 frame %.1f, with 64 frames %.1f", plain, one, moderated)
		return moderated >= 2*plain && moderated >= 2*one
	})
	for _, c := range []Coalescing{{Frames: 65536}, {Frames: -1}, {Wait: 65536 * time.Microsecond}, {Wait: -1}} {
		if err := ib.SetRxCoalescing(c); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if ib.RxCoalescing() != (Coalescing{64, time.Second / 20}) {
		t.Errorf("coalescing is %+v", ib.RxCoalescing())
	}
}
