//go:build linux && cgo && ibverbs

package siw

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/iwarp"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// greet sends a message each way. siw answers nothing before it was spoken to.
func (p *pair) greet(t *testing.T) {
	t.Helper()
	for i, ends := range [][2]*end{{p.client, p.server}, {p.server, p.client}} {
		from, to := ends[0], ends[1]
		sent := from.fill(1000*i, 300)
		to.recv(1, 500000, 400)
		from.send(from.message(2, 1000*i, 300))
		if wc := to.want(from, verbs.OpRecv, 1); wc.ByteLen != 300 || !bytes.Equal(to.mem[500000:500300], sent) {
			t.Errorf("%s got %d bytes, equal %v", to.name, wc.ByteLen, bytes.Equal(to.mem[500000:500300], sent))
		}
		from.want(to, verbs.OpSend, 2)
	}
}

func TestI002_Siw_StartUp(t *testing.T) {
	v4, v6 := addresses(t)
	each(t, func(t *testing.T, active string) {
		for _, c := range []struct {
			name   string
			change func(*iwarp.Config)
		}{
			{"with CRC", func(*iwarp.Config) {}},
			{"without CRC", noCRC},
			{"without reads", func(c *iwarp.Config) { c.IRD, c.ORD = -1, -1 }},
			{"small segments", func(c *iwarp.Config) { c.MULPDU = 128 }},
		} {
			t.Run(c.name, func(t *testing.T) {
				p := connect(t, v4, active, c.change)
				if string(p.asked) != "question" || string(p.said) != "answer" {
					t.Errorf("private data %q and %q", p.asked, p.said)
				}
				p.greet(t)
			})
		}
		t.Run("IPv6", func(t *testing.T) { connect(t, v6, active).greet(t) })
		for _, n := range []int{0, 1, 56} {
			t.Run(fmt.Sprintf("%d bytes of private data", n), func(t *testing.T) {
				ask, say := bytes.Repeat([]byte{0xa5}, n), bytes.Repeat([]byte{0x5a}, n)
				p := connectWith(t, v4, active, ask, say)
				if !bytes.Equal(p.asked, ask) || !bytes.Equal(p.said, say) {
					t.Errorf("private data % x and % x", p.asked, p.said)
				}
				p.greet(t)
			})
		}
	})
	t.Run("244 bytes of private data to siw", func(t *testing.T) {
		ask := bytes.Repeat([]byte("rnbd"), 61)
		p := connectWith(t, v4, "ours", ask, nil)
		if !bytes.Equal(p.asked, ask) {
			t.Errorf("%d bytes arrived: % x", len(p.asked), p.asked)
		}
		p.greet(t)
	})
}

// The end that listens may speak first when we connect.
func TestI005_Siw_ListenerSpeaksFirst(t *testing.T) {
	v4, _ := addresses(t)
	p := connect(t, v4, "ours")
	sent := p.siw.fill(0, 100)
	p.our.recv(1, 0, 200)
	p.siw.send(p.siw.message(2, 0, 100))
	if wc := p.our.want(p.siw, verbs.OpRecv, 1); wc.ByteLen != 100 || !bytes.Equal(p.our.mem[:100], sent) {
		t.Errorf("%+v", wc)
	}
	p.siw.want(p.our, verbs.OpSend, 2)
}

// A responder of ours has work before siw has spoken; it must wait.
func TestI005_Siw_HoldBack(t *testing.T) {
	v4, _ := addresses(t)
	p := connect(t, v4, "siw")
	sent := p.our.fill(0, 5000)
	p.siw.recv(1, 0, 6000)
	p.our.send(p.our.message(2, 0, 5000))
	for range 50 {
		p.our.poll()
		p.siw.poll()
	}
	if len(p.siw.wcs) != 0 {
		t.Fatalf("siw got %+v before it had spoken", p.siw.wcs)
	}
	p.our.recv(3, 10000, 100)
	p.siw.send(p.siw.message(4, 20000, 50))
	p.our.want(p.siw, verbs.OpRecv, 3)
	if wc := p.siw.next(p.our); wc.Op == verbs.OpSend {
		p.siw.want(p.our, verbs.OpRecv, 1)
	} else if wc.Op != verbs.OpRecv || wc.ByteLen != 5000 {
		t.Errorf("%+v", wc)
	}
	if !bytes.Equal(p.siw.mem[:5000], sent) {
		t.Error("data differ")
	}
}

// A siw that listens overlooks a first frame that comes at once; ours pokes it.
func TestI005_Siw_StalledListenerIsPoked(t *testing.T) {
	v4, _ := addresses(t)
	for range 20 {
		p := connect(t, v4, "ours")
		p.siw.recv(1, 0, 100)
		p.our.send(p.our.message(2, 0, 60))
		p.our.cq.Flush()
		p.siw.want(p.our, verbs.OpRecv, 1)
		p.our.want(p.siw, verbs.OpSend, 2)
	}
}

func TestI002_Siw_Reject(t *testing.T) {
	v4, _ := addresses(t)
	refuse := func(t *testing.T, active string, private []byte) error {
		return onFreePort(func() error {
			p := newPair(t, v4, active)
			l := listen(t, p.server.dev, v4)
			defer l.Close()
			done := make(chan error, 1)
			go func() {
				r, err := l.Accept()
				if err == nil {
					err = r.Reject(private)
				}
				done <- err
			}()
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			_, err := p.client.dev.Connect(ctx, p.client.qp, verbs.ConnectParams{Src: v4, Dst: l.Addr(), Private: []byte("may I?")})
			if portTaken(err) {
				return err
			}
			check(t, <-done)
			return err
		})
	}
	t.Run("by siw", func(t *testing.T) {
		var rej *verbs.RejectError
		if err := refuse(t, "ours", []byte("no")); !errors.As(err, &rej) || string(rej.Private) != "no" {
			t.Errorf("%v, want a refusal that says no", err)
		}
	})
	t.Run("by ours", func(t *testing.T) {
		if err := refuse(t, "siw", []byte("no")); err == nil {
			t.Error("siw thinks it is connected")
		} else {
			t.Log(err)
		}
	})
	t.Run("a peer of ours does not take siw for one of its own", func(t *testing.T) {
		var p *pair
		err := onFreePort(func() error {
			p = newPair(t, v4, "ours", func(c *iwarp.Config) { c.Foreign = false })
			return p.join(v4, nil, nil)
		})
		if err == nil {
			t.Error("the extension block was not missed")
		}
		p.siw.end(p.our)
	})
}
