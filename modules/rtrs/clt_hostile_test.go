package rtrs

import (
	"errors"
	"fmt"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/rtrswire"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// Messages of a hostile server: the client keeps its memory and its process,
// and a path to an honest server works again afterwards.

// keyModes runs f with both ways of answering of a server.
func keyModes(t *testing.T, f func(t *testing.T, newRkey bool)) {
	t.Run("plain keys", func(t *testing.T) { f(t, false) })
	t.Run("changing keys", func(t *testing.T) { f(t, true) })
}

// withKeys makes a server use plain or changing keys.
func withKeys(newRkey bool) func(*scriptedServer) {
	return func(s *scriptedServer) {
		s.newRkey = newRkey
		if newRkey {
			s.regions = s.depth
		}
	}
}

// boundaryImms are immediates of every type with the boundary values for a
// client with 8 buffers.
func boundaryImms() (imms []rtrswire.Imm) {
	for _, kind := range []uint32{0, 1, 2, 3, 8, 9, 15} {
		for _, v := range []uint32{0, 7, 8, 1<<19 | 7, 1<<28 - 1} {
			imms = append(imms, rtrswire.Imm(kind<<28|v))
		}
	}
	return imms
}

// hostileMessage is something that a server sends on a connection.
type hostileMessage struct {
	name string
	send func(c *scriptedConn)
}

// hostileMessages are messages without and with an immediate, empty, of the
// length of an RKEY_RSP, and around it.
func hostileMessages() (list []hostileMessage) {
	for _, n := range []int{0, 1, 7, 8, 9, 64, 4096} {
		list = append(list, hostileMessage{fmt.Sprintf("SEND of %d bytes", n), func(c *scriptedConn) {
			c.post(verbs.SendWR{Op: verbs.OpSend}, make([]byte, n))
		}}, hostileMessage{fmt.Sprintf("SEND WITH IMM of %d bytes", n), func(c *scriptedConn) {
			c.post(verbs.SendWR{Op: verbs.OpSendImm, Imm: uint32(rtrswire.IORspImm(false, 0, 1))}, make([]byte, n))
		}})
	}
	list = append(list, hostileMessage{"SEND WITH INVALIDATE", func(c *scriptedConn) {
		c.post(verbs.SendWR{Op: verbs.OpSendInv, RKey: 0x1234}, nil)
	}})
	for _, imm := range boundaryImms() {
		list = append(list, hostileMessage{fmt.Sprintf("immediate %#08x", uint32(imm)), func(c *scriptedConn) { c.imm(imm) }})
	}
	return list
}

// Whatever takes the receive that is meant for the INFO_RSP, and whatever comes
// on the other connections before it: the attempt fails or goes on, and the
// next one succeeds.
func TestHostileServer_BeforeInfoRsp(t *testing.T) {
	keyModes(t, func(t *testing.T, newRkey bool) {
		for _, m := range hostileMessages() {
			for cid := range 2 {
				t.Run(fmt.Sprintf("%s on connection %d", m.name, cid), func(t *testing.T) {
					net := loopback.New()
					s := startScripted(t, net, srvA, withKeys(newRkey))
					s.onInfo = func(rsp []byte) []byte {
						s.onInfo = nil
						m.send(s.last(cid))
						return rsp
					}
					c, cfg := cltConfig(t, 1)
					open := func() error {
						sess, err := Open(cltContext(t), "clt", []PathAddr{pathTo(net.Device("c"), cltA, srvA)}, cfg)
						if err == nil {
							c.Session = sess
							c.stop()
						}
						return err
					}
					_ = open()
					if err := open(); err != nil {
						t.Errorf("the next attempt: %v", err)
					}
				})
			}
		}
	})
}

// openHostile connects to a server that has keys for a READ's memory.
func openHostile(t *testing.T, newRkey bool) (c *cltClient, s *scriptedServer, place rtrswire.Desc) {
	t.Helper()
	held := make(heldRequests, 64)
	c, s, _ = openScripted(t, func(s *scriptedServer) { withKeys(newRkey)(s); held.hold(false)(s) })
	if err := c.read(0, 1, 0, 8192-4096, "where"); err != nil {
		t.Fatal(err)
	}
	r := held.next(t)
	place = r.Desc
	r.answer(0)
	c.finished(1, 0)
	return c, s, place
}

// A connected client survives every message, on every connection; if its path
// ends, it comes back.
func TestHostileServer_AfterInfoRsp(t *testing.T) {
	keyModes(t, func(t *testing.T, newRkey bool) {
		c, s, _ := openHostile(t, newRkey)
		for _, m := range hostileMessages() {
			t.Run(m.name, func(t *testing.T) {
				for cid := range 2 {
					s.do(func() { m.send(s.last(cid)) })
				}
				c.stillServed(t, s)
			})
		}
	})
}

// An RDMA WRITE WITH IMM consumes a receive and says how long it was: more than
// the receive has room for, under changing keys.
func TestHostileServer_WriteWithImmediateAndData(t *testing.T) {
	keyModes(t, func(t *testing.T, newRkey bool) {
		c, s, place := openHostile(t, newRkey)
		for _, n := range []int{1, 7, 8, 9, 64, 4096} {
			for _, imm := range []rtrswire.Imm{rtrswire.IORspImm(false, 0, 1), rtrswire.IORspImm(true, 5, 7), rtrswire.HeartbeatImm, rtrswire.HeartbeatAckImm, 0xffffffff} {
				t.Run(fmt.Sprintf("%d bytes, immediate %#08x", n, uint32(imm)), func(t *testing.T) {
					for cid := range 2 {
						s.do(func() {
							s.last(cid).post(verbs.SendWR{Op: verbs.OpWriteImm, Imm: uint32(imm), RemoteAddr: place.Addr, RKey: place.Key}, make([]byte, n))
						})
					}
					c.stillServed(t, s)
				})
			}
		}
	})
}

// stillServed proves that requests are served, on the path as it is or after
// it was made again, by a server that behaves from now on.
func (c *cltClient) stillServed(t *testing.T, s *scriptedServer) {
	t.Helper()
	s.do(func() { s.onRequest = nil })
	for range 2 { // messages sent before are handled after the first
		served := func() bool {
			err := c.write(1, 77, 0, 8, "u")
			if errors.Is(err, ErrDisconnected) {
				return false
			}
			if err != nil {
				t.Fatal(err)
			}
			d := c.next()
			return d.tag == 77 && d.errno == 0
		}
		eventually(t, "a request is served", served)
	}
	if _, err := c.Register(make([]byte, 16)); err != nil {
		t.Error(err)
	}
}
