package dev

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestCarrierOfTheNetworkBelow: an interface has no carrier while its port's
// network interface has none, or is gone.
func TestCarrierOfTheNetworkBelow(t *testing.T) {
	a, b, ia, _ := pair(t)
	carrier := func(want bool) {
		t.Helper()
		text := map[bool]string{true: "1", false: "0"}[want]
		eventually(t, "the carrier is "+text, func() bool {
			return ia.Carrier() == want && strings.TrimSpace(a.Run("cat", "/sys/class/net/ib0/carrier")) == text
		})
	}
	carrier(true)
	for range 2 {
		b.Run("ip", "link", "set", "eth0", "down") // the other end of the cable
		carrier(false)
		b.Run("ip", "link", "set", "eth0", "up")
		carrier(true)
	}
	a.ping("192.168.50.2")
	a.Run("ip", "link", "set", "eth0", "down")
	carrier(false)
	a.Run("ip", "link", "set", "eth0", "up")
	carrier(true)
	a.Run("ip", "addr", "del", "10.9.0.1/24", "dev", "eth0")
	carrier(false)
	a.Run("ip", "addr", "add", "10.9.0.1/24", "dev", "eth0")
	carrier(true)
	a.ping("192.168.50.2")
}

// TestCarrierOfLoopback: a port at an address that no interface names has
// carrier.
func TestCarrierOfLoopback(t *testing.T) {
	a, _ := hosts(t, 1500)
	h := newHost(t, a.Namespace, loopbackPort)
	i := h.open(Config{})
	eventually(t, "there is carrier", i.Carrier)
}

// TestAnnounceAgain: an announcement that is due is sent once.
func TestAnnounceAgain(t *testing.T) {
	_, _, ia, ib := pair(t)
	pcap := &buffer{}
	if err := ib.Capture(pcap); err != nil {
		t.Fatal(err)
	}
	ia.mu.Lock()
	ia.again = time.Now()
	ia.mu.Unlock()
	ia.wakeTimers()
	ip := []byte{192, 168, 50, 1}
	local := ia.Address()
	gratuitous := slices.Concat([]byte{0, 32, 8, 0, 20, 4, 0, 1}, local[:], ip, make([]byte, 20), ip)
	eventually(t, "the address is announced", func() bool { return bytes.Count(pcap.bytes(), gratuitous) == 1 })
	ia.mu.Lock()
	defer ia.mu.Unlock()
	if !ia.again.IsZero() {
		t.Error("the announcement is due again")
	}
}
