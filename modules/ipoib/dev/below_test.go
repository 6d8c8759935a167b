package dev

import (
	"strings"
	"testing"
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
