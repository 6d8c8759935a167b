package rocev2

import (
	"bytes"
	"net"
	"net/netip"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs/verbstest"
)

func TestC053_Datagrams(t *testing.T) {
	t.Run("two devices", func(t *testing.T) {
		verbstest.RunDatagrams(t, func(t *testing.T) verbstest.Datagrams {
			return verbstest.Datagrams{A: openDevice(t, Config{}), B: openDevice(t, Config{}), AddrA: addrA, AddrB: addrB}
		})
	})
	t.Run("one device, no offloads", func(t *testing.T) {
		verbstest.RunDatagrams(t, func(t *testing.T) verbstest.Datagrams {
			d := openDevice(t, Config{Addrs: []netip.Addr{addrA}, NoOffload: true})
			return verbstest.Datagrams{A: d, B: d, AddrA: addrA, AddrB: addrB}
		})
	})
}

// TestC053_BesideConnections: the queue pairs of both kinds have sockets of
// their own, in whatever order they are made.
func TestC053_BesideConnections(t *testing.T) {
	a, b := openDevice(t, Config{}), openDevice(t, Config{})
	qa := must(a.OpenDatagrams(verbs.DatagramConfig{Local: addrA, QKey: 1}))(t)
	defer qa.Close()
	verbstest.Run(t, func(t *testing.T) verbstest.Fabric {
		return verbstest.Fabric{Client: openDevice(t, Config{Addrs: []netip.Addr{testAddr(3)}}), Server: b, Addr: netip.AddrPortFrom(addrB, 0), Src: testAddr(3), Garbage: garbage}
	})
	qb := must(b.OpenDatagrams(verbs.DatagramConfig{Local: addrB, QKey: 1}))(t)
	defer qb.Close()
	if _, err := qa.Send([]verbs.Datagram{{Payload: []byte("beside"), Peer: addrB, QPN: qb.QPN(), QKey: 1}}); err != nil {
		t.Fatal(err)
	}
	msgs := []verbs.Datagram{{Payload: make([]byte, 100)}}
	if n, err := qb.Receive(msgs); n != 1 || err != nil || string(msgs[0].Payload) != "beside" {
		t.Fatalf("Receive: %d, %v, %q", n, err, msgs[0].Payload)
	}
}

// TestC053_Garbage sends invalid datagrams, byte by byte changed: nothing of
// it is received, and all of it is counted.
func TestC053_Garbage(t *testing.T) {
	d := openDevice(t, Config{})
	q := must(d.OpenDatagrams(verbs.DatagramConfig{Local: addrB, QKey: 9}))(t)
	defer q.Close()
	c := must(net.DialUDP("udp", &net.UDPAddr{IP: addrA.AsSlice()}, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addrB, roceUDPPort))))(t)
	defer c.Close()
	packet := func(change func(b []byte)) []byte {
		b := make([]byte, udHead+8+icrcLen)
		putBTH(b, opDatagram, 0, q.QPN(), 0, false)
		be.PutUint32(b[bthLen:], 9)
		be.PutUint32(b[bthLen+4:], 5)
		copy(b[udHead:], "payload!")
		change(b)
		ps := newPseudo(addrA, addrB, uint16(c.LocalAddr().(*net.UDPAddr).Port))
		ps.sealPacket(b, 0)
		return b
	}
	bad := [][]byte{
		packet(func(b []byte) { b[0] = 0x04 }), // SEND of a reliable connection
		packet(func(b []byte) { b[1] = 0x01 }), // version
		packet(func(b []byte) { be.PutUint32(b[4:], q.QPN()+256) }),
		packet(func([]byte) {})[:udHead], // without an ICRC
	}
	for i := range udHead + 8 + icrcLen {
		b := packet(func([]byte) {})
		if b[i] ^= 0x10; i != 4 && i != 7 { // byte 4 is not covered, byte 7 leads to another socket
			bad = append(bad, b)
		}
	}
	for _, b := range bad {
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
	}
	good := packet(func([]byte) {})
	if _, err := c.Write(good); err != nil {
		t.Fatal(err)
	}
	msgs := []verbs.Datagram{{Payload: make([]byte, 100)}, {Payload: make([]byte, 100)}}
	if n, err := q.Receive(msgs); n != 1 || err != nil || !bytes.Equal(msgs[0].Payload, []byte("payload!")) {
		t.Fatalf("Receive: %d, %v, %q; want the good one", n, err, msgs[0].Payload)
	}
	dropped := uint64(0)
	for _, n := range d.Stats().Dropped {
		dropped += n
	}
	if dropped != uint64(len(bad)) {
		t.Errorf("%d packets dropped, want %d", dropped, len(bad))
	}
}
