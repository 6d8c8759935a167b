//go:build linux && cgo && ibverbs

package siw

import (
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// breach is a request that breaks a rule of the peer.
type breach struct {
	name string
	post func(me, peer *end, small verbs.MR) // small: 4 KiB at the start of peer's memory, without any right of the peer
	siw  uint32                              // layer, type and code of siw's end of the connection
	ours uint32                              // those of ours; 0: the same
	// status of the request at the end that made it, when that is ours.
	status verbs.Status
}

func stagOf(wr verbs.SendWR, key uint32) verbs.SendWR { wr.RKey = key; return wr }

var breaches = []breach{
	{name: "I-004 row 15: WRITE with a key that is none", siw: 0x010100, post: func(me, peer *end, _ verbs.MR) {
		me.send(stagOf(me.to(peer, verbs.OpWrite, 1, 0, 100, 0), peer.mr.RKey()^0x5a5a5a00))
	}},
	{name: "I-004 row 15: WRITE with another variant of the key", siw: 0x010100, post: func(me, peer *end, _ verbs.MR) {
		me.send(stagOf(me.to(peer, verbs.OpWrite, 1, 0, 100, 0), peer.mr.RKey()^0x01))
	}},
	{name: "I-004 row 15: WRITE without the right", siw: 0x010100, post: func(me, peer *end, small verbs.MR) {
		me.send(stagOf(me.to(peer, verbs.OpWrite, 1, 0, 100, 0), small.RKey()))
	}},
	{name: "I-004 row 15: WRITE beyond the end", siw: 0x010101, post: func(me, peer *end, _ verbs.MR) {
		me.send(me.to(peer, verbs.OpWrite, 1, 0, 100, memSize-99))
	}},
	{name: "I-004 row 15: WRITE before the start", siw: 0x010101, post: func(me, peer *end, _ verbs.MR) {
		me.send(me.to(peer, verbs.OpWrite, 1, 0, 100, -1))
	}},
	{name: "I-004 row 14: READ with a key that is none", siw: 0x000100, status: verbs.StatusRemoteAccess, post: func(me, peer *end, _ verbs.MR) {
		me.send(stagOf(me.to(peer, verbs.OpRead, 1, 0, 100, 0), peer.mr.RKey()^0x5a5a5a00))
	}},
	{name: "I-004 row 14: READ beyond the end", siw: 0x000101, status: verbs.StatusRemoteAccess, post: func(me, peer *end, _ verbs.MR) {
		me.send(me.to(peer, verbs.OpRead, 1, 0, 100, memSize-99))
	}},
	{name: "I-004 row 8: SEND without a receive", siw: 0x010202, post: func(me, _ *end, _ verbs.MR) {
		me.send(me.message(1, 0, 100))
	}},
	{name: "I-004 row 10: SEND longer than its receive", siw: 0x010202, ours: 0x010205, post: func(me, peer *end, _ verbs.MR) {
		peer.recv(9, 0, 99)
		me.send(me.message(1, 0, 100))
	}},
}

// TestI009_Siw_Terminates: siw's Terminate messages when we break its rules.
func TestI009_Siw_Terminates(t *testing.T) {
	v4, _ := addresses(t)
	each(t, func(t *testing.T, active string) {
		for _, c := range breaches {
			t.Run(c.name, func(t *testing.T) {
				p := connect(t, v4, active)
				p.greet(t)
				small, err := p.siw.pd.RegMR(p.siw.mem[:4096], 0)
				check(t, err)
				c.post(p.our, p.siw, small)
				last, before := p.our.end(p.siw)
				if last.VendorCode != c.siw || last.Status == verbs.StatusOK {
					t.Errorf("Terminate %06x, status %d; want %06x", last.VendorCode, last.Status, c.siw)
				}
				if len(before) != 1 || before[0].ID != 1 || before[0].Status != c.status {
					t.Errorf("before it: %+v, want status %d", before, c.status)
				}
				p.siw.end(p.our)
				check(t, small.Close())
			})
		}
	})
	t.Run("I-004 row 19: SEND WITH INVALIDATE of a key that is none", func(t *testing.T) {
		p := connect(t, v4, "ours")
		p.greet(t)
		p.siw.recv(9, 0, 100)
		inv := p.our.message(1, 0, 30)
		inv.Op, inv.RKey = verbs.OpSendInv, p.siw.mr.RKey()^0x5a5a5a00
		p.our.send(inv)
		if last, _ := p.our.end(p.siw); last.VendorCode != 0x000209 {
			t.Errorf("Terminate %06x, want 000209", last.VendorCode)
		}
		p.siw.end(p.our)
	})
	// Not a rule of siw's: docs/extend/protocol/iwarp.md says so.
	t.Run("READ without the right is served", func(t *testing.T) {
		p := connect(t, v4, "ours")
		p.greet(t)
		small, err := p.siw.pd.RegMR(p.siw.mem[:4096], 0)
		check(t, err)
		p.our.send(stagOf(p.our.to(p.siw, verbs.OpRead, 1, 0, 100, 0), small.RKey()))
		p.our.want(p.siw, verbs.OpRead, 1)
		check(t, small.Close())
	})
}

// TestI004_Siw_IsTerminated: our Terminate messages when siw breaks our rules,
// and that it takes them.
func TestI004_Siw_IsTerminated(t *testing.T) {
	v4, _ := addresses(t)
	impatient := func(c *iwarp.Config) { c.RNRTimeout = 300 * time.Millisecond }
	each(t, func(t *testing.T, active string) {
		for _, c := range breaches {
			t.Run(c.name, func(t *testing.T) {
				p := connect(t, v4, active, impatient)
				p.greet(t)
				small, err := p.our.pd.RegMR(p.our.mem[:4096], 0)
				check(t, err)
				defer small.Close()
				c.post(p.siw, p.our, small)
				p.mustEnd(t, max(c.ours, c.siw))
			})
		}
	})
	t.Run("I-004 row 14: READ without the right", func(t *testing.T) {
		p := connect(t, v4, "ours")
		p.greet(t)
		small, err := p.our.pd.RegMR(p.our.mem[:4096], 0)
		check(t, err)
		defer small.Close()
		p.siw.send(stagOf(p.siw.to(p.our, verbs.OpRead, 1, 0, 100, 0), small.RKey()))
		p.mustEnd(t, 0x000102)
	})
	// A program's SEND WITH INVALIDATE leaves siw with key 0.
	t.Run("I-004 row 19: SEND WITH INVALIDATE of a key that is none", func(t *testing.T) {
		p := connect(t, v4, "ours")
		p.greet(t)
		p.our.recv(9, 0, 100)
		inv := p.siw.message(1, 0, 30)
		inv.Op, inv.RKey = verbs.OpSendInv, p.our.mr.RKey()
		p.siw.send(inv)
		p.mustEnd(t, 0x000209)
	})
}

// mustEnd checks that our end has terminated the connection with code, and
// that siw's ends too.
func (p *pair) mustEnd(t *testing.T, code uint32) {
	t.Helper()
	last, _ := p.our.end(p.siw)
	if last.VendorCode != code || last.Status == verbs.StatusOK {
		t.Errorf("ended with %06x, status %d; want %06x", last.VendorCode, last.Status, code)
	}
	p.siw.end(p.our)
}
