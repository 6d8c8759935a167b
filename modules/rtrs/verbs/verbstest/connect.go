package verbstest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

// samePrivate reports whether got is want, possibly padded with zeros: a fabric
// may pad private data.
func samePrivate(got, want []byte) bool {
	return bytes.HasPrefix(got, want) && len(bytes.Trim(got[len(want):], "\x00")) == 0
}

func private(n int) []byte {
	b := make([]byte, n)
	fill(b, 3)
	return b
}

// answerOne takes the next request of l, calls answer, and delivers its
// result.
func answerOne(l verbs.Listener, answer func(verbs.ConnRequest) error) chan error {
	done := make(chan error, 1)
	go func() {
		req, err := l.Accept()
		if err == nil {
			err = answer(req)
		}
		done <- err
	}()
	return done
}

func connectPrivateData(t *testing.T, f Fabric) {
	p := &pair{t, newEnd(t, f.Client), newEnd(t, f.Server)}
	l := must(f.Server.Listen(f.Addr))(t)
	t.Cleanup(func() { l.Close() })
	for i, size := range []int{0, 1, 20, verbs.MaxPrivate} {
		ctx := uint64(i)
		client, server := p.client.newQP(ctx), p.server.newQP(ctx)
		request, answer := private(size), private(verbs.MaxPrivate-size)
		done := answerOne(l, func(req verbs.ConnRequest) error {
			if !samePrivate(req.Private(), request) {
				return fmt.Errorf("request has private data %x, want %x", req.Private(), request)
			}
			return req.Accept(server, answer)
		})
		got := must(f.Client.Connect(patient(t), client, verbs.ConnectParams{Dst: l.Addr(), Private: request}))(t)
		check(t, <-done)
		if !samePrivate(got, answer) {
			t.Errorf("answer has private data %x, want %x", got, answer)
		}
		client.Disconnect()
		p.settle(ctx)
		client.Destroy()
		server.Destroy()
	}
}

// itself and verbs.GID are how the active end may name addresses.
func itself(a netip.Addr) netip.Addr { return a }

func connectAddresses(t *testing.T, f Fabric) { addresses(t, f, f.Addr, itself) }

func connectGIDs(t *testing.T, f Fabric) {
	if f.OwnGIDs {
		t.Skip("GIDs are no IP addresses here")
	}
	addresses(t, f, f.Addr, verbs.GID)
	if f.Addr6.IsValid() {
		addresses(t, f, f.Addr6, verbs.GID)
	}
}

func connectIPv6(t *testing.T, f Fabric) {
	if !f.Addr6.IsValid() {
		t.Skip("no IPv6 here")
	}
	addresses(t, f, f.Addr6, itself)
}

// addresses connects and checks the addresses that both ends report.
func addresses(t *testing.T, f Fabric, addr netip.AddrPort, as func(netip.Addr) netip.Addr) {
	p := &pair{t, newEnd(t, f.Client), newEnd(t, f.Server)}
	client, server := p.client.newQP(1), p.server.newQP(1)
	l := must(f.Server.Listen(addr))(t)
	t.Cleanup(func() { l.Close() })
	if l.Addr().Addr() != addr.Addr() || l.Addr().Port() == 0 {
		t.Errorf("listener at %s, asked for %s", l.Addr(), addr)
	}
	var local, remote netip.AddrPort
	done := answerOne(l, func(req verbs.ConnRequest) error {
		local, remote = req.LocalAddr(), req.RemoteAddr()
		return req.Accept(server, nil)
	})
	src := addr.Addr()
	if f.Src.IsValid() && f.Src.Is4() == src.Is4() {
		src = f.Src
	}
	params := verbs.ConnectParams{Src: as(src), Dst: netip.AddrPortFrom(as(l.Addr().Addr()), l.Addr().Port())}
	must(f.Client.Connect(patient(t), client, params))(t)
	check(t, <-done)
	if local != l.Addr() || server.LocalAddr() != local || client.RemoteAddr() != l.Addr() {
		t.Errorf("passive end is at %s: request says %s, its queue pair %s, the peer's %s", l.Addr(), local, server.LocalAddr(), client.RemoteAddr())
	}
	if remote != client.LocalAddr() || remote != server.RemoteAddr() || remote.Addr() != src {
		t.Errorf("active end is at %s: request says %s, the peer's queue pair %s", client.LocalAddr(), remote, server.RemoteAddr())
	}
	client.Disconnect()
	p.settle(1)
	client.Destroy()
	server.Destroy()
}

func rejectPrivateData(t *testing.T, f Fabric) {
	e := newEnd(t, f.Client)
	l := must(f.Server.Listen(f.Addr))(t)
	t.Cleanup(func() { l.Close() })
	for _, size := range []int{0, verbs.MaxPrivate} {
		qp := e.newQP(1)
		t.Cleanup(qp.Destroy)
		done := answerOne(l, func(req verbs.ConnRequest) error { return req.Reject(private(size)) })
		_, err := f.Client.Connect(patient(t), qp, verbs.ConnectParams{Dst: l.Addr(), Private: private(56)})
		check(t, <-done)
		var reject *verbs.RejectError
		if !errors.As(err, &reject) || !samePrivate(reject.Private, private(size)) {
			t.Errorf("refusal with %d bytes: %v %+v", size, err, reject)
		}
	}
}

func connectAbsent(t *testing.T, f Fabric) {
	e := newEnd(t, f.Client)
	l := must(f.Server.Listen(f.Addr))(t)
	check(t, l.Close())
	qp := e.newQP(1)
	t.Cleanup(qp.Destroy)
	_, err := f.Client.Connect(patient(t), qp, verbs.ConnectParams{Dst: l.Addr()})
	var reject *verbs.RejectError
	if err == nil || errors.As(err, &reject) {
		t.Errorf("connect to an absent listener: %v, want an error that is no refusal by a consumer", err)
	}
}

func garbage(t *testing.T, f Fabric) {
	if f.Garbage == nil {
		t.Skip("the fabric cannot carry garbage")
	}
	p := &pair{t, newEnd(t, f.Client), newEnd(t, f.Server)}
	client, server := p.client.newQP(1), p.server.newQP(1)
	l := must(f.Server.Listen(f.Addr))(t)
	t.Cleanup(func() { l.Close() })
	f.Garbage(t, l.Addr())
	done := answerOne(l, func(req verbs.ConnRequest) error {
		if !samePrivate(req.Private(), private(9)) {
			return fmt.Errorf("accept delivered %x", req.Private())
		}
		return req.Accept(server, nil)
	})
	must(f.Client.Connect(patient(t), client, verbs.ConnectParams{Dst: l.Addr(), Private: private(9)}))(t)
	check(t, <-done)
	client.Disconnect()
	p.settle(1)
	client.Destroy()
	server.Destroy()
}

func connectCancelled(t *testing.T, f Fabric) {
	e := newEnd(t, f.Client)
	l := must(f.Server.Listen(f.Addr))(t) // and never accepts
	t.Cleanup(func() { l.Close() })
	qp := e.newQP(1)
	t.Cleanup(qp.Destroy)
	ctx, cancel := context.WithCancel(patient(t))
	done := make(chan error, 1)
	go func() {
		_, err := f.Client.Connect(ctx, qp, verbs.ConnectParams{Dst: l.Addr()})
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled connect: %v", err)
	}
}

func listenerClose(t *testing.T, f Fabric) {
	l := must(f.Server.Listen(f.Addr))(t)
	done := answerOne(l, func(verbs.ConnRequest) error { return nil })
	check(t, l.Close())
	if err := <-done; !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("accept of a closed listener: %v", err)
	}
	if _, err := l.Accept(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("accept after close: %v", err)
	}
}

func listenerReuse(t *testing.T, f Fabric) {
	l := must(f.Server.Listen(f.Addr))(t)
	if second, err := f.Server.Listen(l.Addr()); err == nil {
		second.Close()
		t.Error("two listeners at one address")
	}
	check(t, l.Close())
	l = must(f.Server.Listen(l.Addr()))(t)
	check(t, l.Close())
}

func sendUnconnected(t *testing.T, f Fabric) {
	e := newEnd(t, f.Client)
	qp := e.newQP(1)
	t.Cleanup(qp.Destroy)
	n, err := qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Signaled: true}})
	if n != 0 || !errors.Is(err, verbs.ErrNotConnected) {
		t.Errorf("PostSend took %d, %v", n, err)
	}
	e.recv(qp, 1, 0, 8) // receives may come first
}
