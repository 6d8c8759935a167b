package loopback_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
)

var (
	clientIP = netip.MustParseAddr("10.0.0.2")
	serverIP = netip.MustParseAddr("10.0.0.1")
	otherIP  = netip.MustParseAddr("10.0.1.2")
	port     = netip.AddrPortFrom(serverIP, 1234)
)

// end is one side of a connection with one region of memory.
type end struct {
	t   *testing.T
	dev verbs.Device
	pd  verbs.PD
	cq  verbs.CQ
	qp  verbs.QP
	mem []byte
	mr  verbs.MR
}

const (
	depth   = 16
	memSize = 1 << 16
)

func newEnd(t *testing.T, dev verbs.Device) *end {
	e := &end{t: t, dev: dev, mem: make([]byte, memSize)}
	var err error
	e.pd, err = dev.AllocPD()
	must(t, err)
	e.cq, err = dev.CreateCQ(depth)
	must(t, err)
	e.mr, err = e.pd.RegMR(e.mem, verbs.AccessRemoteWrite|verbs.AccessRemoteRead)
	must(t, err)
	e.qp = e.newQP()
	t.Cleanup(func() {
		e.qp.Destroy()
		must(t, e.mr.Close())
		must(t, e.pd.Close())
		must(t, e.cq.Close())
	})
	return e
}

func (e *end) newQP() verbs.QP {
	qp, err := e.dev.CreateQP(e.pd, verbs.QPConfig{CQ: e.cq, SendQueue: depth, RecvQueue: depth, MaxSGE: 2})
	must(e.t, err)
	return qp
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// pair connects two ends from src to port.
func pair(t *testing.T, n *loopback.Network, src netip.Addr) (client, server *end) {
	t.Helper()
	client, server = newEnd(t, n.Device("client")), newEnd(t, n.Device("server"))
	l, err := server.dev.Listen(port)
	must(t, err)
	defer l.Close()
	accepted := make(chan error, 1)
	go func() {
		req, err := l.Accept()
		if err == nil {
			err = req.Accept(server.qp, nil)
		}
		accepted <- err
	}()
	_, err = client.dev.Connect(timeout(t), client.qp, verbs.ConnectParams{Src: src, Dst: port})
	must(t, err)
	must(t, <-accepted)
	return client, server
}

func timeout(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// write posts a signalled write of text to the start of peer's memory, with
// an immediate.
func (e *end) write(peer *end, id uint64, text string) {
	e.t.Helper()
	n := copy(e.mem, text)
	wr := verbs.SendWR{ID: id, Op: verbs.OpWriteImm, Signaled: true, Imm: uint32(id),
		SGEs: []verbs.SGE{{Buf: e.mem[:n], LKey: e.mr.LKey()}}, RemoteAddr: peer.mr.Addr(), RKey: peer.mr.RKey()}
	_, err := e.qp.PostSend([]verbs.SendWR{wr})
	must(e.t, err)
	e.cq.Flush()
}

func (e *end) recvs(n int) {
	e.t.Helper()
	for i := range n {
		_, err := e.qp.PostRecv([]verbs.RecvWR{{ID: uint64(1000 + i)}})
		must(e.t, err)
	}
}

// drain polls until there are no more completions and describes them.
func (e *end) drain() []string {
	var got []string
	var wcs [4]verbs.WC
	for n := e.cq.Poll(wcs[:]); n > 0; n = e.cq.Poll(wcs[:]) {
		for _, wc := range wcs[:n] {
			got = append(got, describe(wc))
		}
	}
	return got
}

func describe(wc verbs.WC) string {
	switch {
	case wc.Op == verbs.OpDisconnected:
		return fmt.Sprintf("disconnected status %d", wc.Status)
	case wc.Status != verbs.StatusOK:
		return fmt.Sprintf("%d status %d", wc.ID, wc.Status)
	case wc.HasImm:
		return fmt.Sprintf("imm %d", wc.Imm)
	}
	return fmt.Sprintf("%d ok", wc.ID)
}

func expect(t *testing.T, who string, got []string, want ...string) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s got %q, want %q", who, got, want)
	}
}

func TestStall_NothingArrivesUntilResume(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	server.recvs(2)
	n.Stall(clientIP, serverIP)
	client.write(server, 1, "late")
	expect(t, "server", server.drain())
	expect(t, "client", client.drain())
	n.Resume(clientIP, serverIP)
	expect(t, "server", server.drain(), "imm 1")
	expect(t, "client", client.drain(), "1 ok")
	if string(server.mem[:4]) != "late" {
		t.Errorf("memory is %q", server.mem[:4])
	}
}

func TestStall_BytesOfAGoneSenderStillArrive(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	server.recvs(2)
	n.Stall(clientIP, serverIP)
	client.write(server, 1, "old")
	client.qp.Disconnect()
	expect(t, "client", client.drain(), "1 status 1", "disconnected status 0")
	copy(client.mem, "new") // the memory is the sender's again
	expect(t, "server", server.drain())
	n.Resume(clientIP, serverIP)
	expect(t, "server", server.drain(), "imm 1", "1001 status 1", "disconnected status 0")
	if string(server.mem[:3]) != "old" {
		t.Errorf("memory is %q, want what was sent", server.mem[:3])
	}
}

func TestStallOneWay_RequestsArriveAndAcknowledgementsDoNot(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	server.recvs(1)
	n.StallOneWay(serverIP, clientIP)
	client.write(server, 1, "x")
	expect(t, "server", server.drain(), "imm 1")
	expect(t, "client", client.drain())
	n.Resume(clientIP, serverIP)
	expect(t, "client", client.drain(), "1 ok")
}

func TestStall_ConnectWaitsAndHonoursItsContext(t *testing.T) {
	n := loopback.New()
	client, server := newEnd(t, n.Device("client")), newEnd(t, n.Device("server"))
	l, err := server.dev.Listen(port)
	must(t, err)
	defer l.Close()
	n.Stall(clientIP, serverIP)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err = client.dev.Connect(ctx, client.qp, verbs.ConnectParams{Src: clientIP, Dst: port})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Connect over a stalled link: %v", err)
	}
}

func TestStallOneWay_AnAcceptedPeerThatGaveUpDisconnects(t *testing.T) {
	n := loopback.New()
	client, server := newEnd(t, n.Device("client")), newEnd(t, n.Device("server"))
	l, err := server.dev.Listen(port)
	must(t, err)
	defer l.Close()
	n.StallOneWay(serverIP, clientIP)
	ctx, cancel := context.WithCancel(timeout(t))
	connected := make(chan error, 1)
	go func() {
		_, err := client.dev.Connect(ctx, client.qp, verbs.ConnectParams{Src: clientIP, Dst: port})
		connected <- err
	}()
	req, err := l.Accept()
	must(t, err)
	must(t, req.Accept(server.qp, nil))
	expect(t, "server", server.drain())
	cancel()
	if err := <-connected; !errors.Is(err, context.Canceled) {
		t.Fatalf("Connect: %v", err)
	}
	expect(t, "server", server.drain(), "disconnected status 0")
}

func TestHold_StepLetsOneMessageThrough(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	server.recvs(3)
	n.Hold(clientIP, serverIP)
	for id := range uint64(3) {
		client.write(server, id, "x")
	}
	if got := n.Held(clientIP, serverIP); got != 3 {
		t.Fatalf("%d messages held, want 3", got)
	}
	for id := range 2 {
		if !n.Step(clientIP, serverIP) {
			t.Fatal("nothing to step")
		}
		expect(t, "server", server.drain(), fmt.Sprintf("imm %d", id))
	}
	n.Release(clientIP, serverIP)
	expect(t, "server", server.drain(), "imm 2")
	if n.Step(clientIP, serverIP) {
		t.Error("Step found a message on an empty link")
	}
}

func TestCut_BothEndsOfThePairAndNoOther(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	client2, server2 := pair(t, n, otherIP)
	server.recvs(1)
	server2.recvs(1)
	client.write(server, 1, "x")
	if got := n.Cut(serverIP, clientIP); got != 1 {
		t.Errorf("cut %d connections, want 1", got)
	}
	expect(t, "client", client.drain(), "1 status 1", "disconnected status 7")
	expect(t, "server", server.drain(), "1000 status 1", "disconnected status 7")
	client2.write(server2, 2, "x")
	expect(t, "second server", server2.drain(), "imm 2")
	if got := len(n.Conns()); got != 1 {
		t.Errorf("%d connections left, want 1", got)
	}
}

func TestTap_SeesWhatLeavesAndMayCutBeforeIt(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	server.recvs(3)
	var seen []string
	n.Tap(func(e loopback.Event) {
		seen = append(seen, fmt.Sprintf("op %d imm %d len %d %q", e.Op, e.Imm, e.Len, e.Data))
		if e.Imm == 2 && !n.CutConn(e.To, e.From) {
			t.Error("no connection to cut")
		}
	})
	client.write(server, 1, "one")
	client.write(server, 2, "two")
	n.Tap(nil)
	expect(t, "tap", seen, `op 5 imm 1 len 3 "one"`, `op 5 imm 2 len 3 "two"`)
	expect(t, "server", server.drain(), "1000 status 1", "1001 status 1", "1002 status 1", "disconnected status 7")
	expect(t, "client", client.drain(), "1 status 1", "2 status 1", "disconnected status 7")
}

func TestTap_SeesTheHandshake(t *testing.T) {
	n := loopback.New()
	var kinds []loopback.Kind
	n.Tap(func(e loopback.Event) { kinds = append(kinds, e.Kind) })
	pair(t, n, clientIP)
	if fmt.Sprint(kinds) != fmt.Sprint([]loopback.Kind{loopback.KindConnect, loopback.KindAccept}) {
		t.Errorf("events %v", kinds)
	}
}

func TestDialFaults(t *testing.T) {
	refusal := errors.New("no route")
	tests := []struct {
		name  string
		fault func(n *loopback.Network)
		want  error
	}{
		{"a refused address fails with the given error", func(n *loopback.Network) { n.RefuseDial(port, refusal) }, refusal},
		{"a dropped listener is absent", func(n *loopback.Network) { n.DropListener(port) }, syscall.ECONNREFUSED},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			n := loopback.New()
			client, server := newEnd(t, n.Device("client")), newEnd(t, n.Device("server"))
			l, err := server.dev.Listen(port)
			must(t, err)
			defer l.Close()
			tt.fault(n)
			_, err = client.dev.Connect(timeout(t), client.qp, verbs.ConnectParams{Dst: port})
			if !errors.Is(err, tt.want) {
				t.Errorf("Connect: %v, want %v", err, tt.want)
			}
		})
	}
}

func TestDropListener_EndsAccept(t *testing.T) {
	n := loopback.New()
	l, err := n.Device("server").Listen(port)
	must(t, err)
	n.DropListener(port)
	if _, err := l.Accept(); !errors.Is(err, verbs.ErrClosed) {
		t.Errorf("Accept: %v", err)
	}
}

func TestDelay_WakesASleepingOwner(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	server.recvs(1)
	server.drain()
	const delay = 30 * time.Millisecond
	n.Delay(clientIP, serverIP, delay)
	server.drain()
	start := time.Now()
	client.write(server, 1, "x")
	var got []string
	for len(got) == 0 && time.Since(start) < 5*time.Second {
		if server.cq.Arm() {
			unix.Poll([]unix.PollFd{{Fd: int32(server.cq.FD()), Events: unix.POLLIN}}, 5000)
		}
		got = server.drain()
	}
	expect(t, "server", got, "imm 1")
	if took := time.Since(start); took < delay {
		t.Errorf("arrived after %v, want at least %v", took, delay)
	}
}

func TestSendQueue_RoomComesBackWithASignalledCompletion(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	wr := verbs.SendWR{Op: verbs.OpWrite}
	for range depth - 1 {
		_, err := client.qp.PostSend([]verbs.SendWR{wr})
		must(t, err)
	}
	client.cq.Flush()
	server.drain()
	client.drain()
	wr.Signaled = true
	_, err := client.qp.PostSend([]verbs.SendWR{wr})
	must(t, err)
	if _, err := client.qp.PostSend([]verbs.SendWR{wr}); !errors.Is(err, verbs.ErrQueueFull) {
		t.Fatalf("post to a full queue: %v", err)
	}
	client.cq.Flush()
	server.drain()
	expect(t, "client", client.drain(), "0 ok")
	if k, err := client.qp.PostSend([]verbs.SendWR{wr, wr}); k != 2 || err != nil {
		t.Errorf("posted %d, %v", k, err)
	}
}

func TestTwoOwnersPanic(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	defer func() {
		if recover() == nil {
			t.Error("no panic")
		}
	}()
	n.Tap(func(loopback.Event) { client.drain() })
	client.write(server, 1, "x")
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	n := loopback.New()
	client, server := pair(t, n, clientIP)
	recv := []verbs.RecvWR{{}}
	send := []verbs.SendWR{{Op: verbs.OpWriteImm, Signaled: true, RemoteAddr: server.mr.Addr(), RKey: server.mr.RKey(),
		SGEs: []verbs.SGE{{Buf: client.mem[:4096], LKey: client.mr.LKey()}}}}
	wcs := make([]verbs.WC, 4)
	step := func() {
		server.qp.PostRecv(recv)
		client.qp.PostSend(send)
		client.cq.Poll(wcs)
		if server.cq.Poll(wcs) != 1 || client.cq.Poll(wcs) != 1 {
			t.Fatal("a message got lost")
		}
		client.cq.Arm()
	}
	step()
	if got := testing.AllocsPerRun(100, step); got != 0 {
		t.Errorf("%v allocations per message, want 0", got)
	}
}

func TestStallConn_OthersGoOn(t *testing.T) {
	n := loopback.New()
	first, firstServer := pair(t, n, clientIP)
	second, secondServer := pair(t, n, clientIP)
	firstServer.recvs(1)
	secondServer.recvs(1)
	a, b := first.qp.LocalAddr(), first.qp.RemoteAddr()
	if !n.StallConn(a, b, true) {
		t.Fatal("there is no such connection")
	}
	first.write(firstServer, 1, "x")
	second.write(secondServer, 2, "y")
	expect(t, "stalled server", firstServer.drain())
	expect(t, "other server", secondServer.drain(), "imm 2")
	expect(t, "stalled client", first.drain())
	expect(t, "other client", second.drain(), "2 ok")
	n.StallConn(a, b, false)
	expect(t, "server", firstServer.drain(), "imm 1")
	expect(t, "client", first.drain(), "1 ok")
}

func TestCrash_PeersHearOfItOnlyByAReset(t *testing.T) {
	for _, reset := range []bool{true, false} {
		t.Run(fmt.Sprintf("reset %t", reset), func(t *testing.T) {
			n := loopback.New()
			client, server := pair(t, n, clientIP)
			server.recvs(1)
			client.write(server, 1, "x")
			n.Crash(server.dev, reset)
			if reset {
				expect(t, "client", client.drain(), "1 status 1", "disconnected status 0")
			} else {
				expect(t, "client", client.drain())
			}
			expect(t, "server", server.drain(), "1000 status 1", "disconnected status 7")
		})
	}
}

func TestWithAckTimeout_EndsAnEndWithoutProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := loopback.New(loopback.WithAckTimeout(7 * time.Second))
		client, server := pair(t, n, clientIP)
		server.recvs(2)
		n.Stall(clientIP, serverIP)
		client.write(server, 1, "x")
		expect(t, "client", client.drain())
		time.Sleep(8 * time.Second)
		expect(t, "client", client.drain(), "1 status 1", "disconnected status 7")
	})
}

// An answer that comes while the dialling end gives up changes nothing.
func TestConnect_AnEndThatGaveUpKeepsItsReason(t *testing.T) {
	n := loopback.New()
	server := newEnd(t, n.Device("server"))
	l, err := server.dev.Listen(port)
	must(t, err)
	defer l.Close()
	n.StallOneWay(serverIP, clientIP) // no answer arrives
	for range 200 {
		client := newEnd(t, n.Device("client"))
		ctx, cancel := context.WithCancel(timeout(t))
		connected := make(chan error, 1)
		go func() {
			_, err := client.dev.Connect(ctx, client.qp, verbs.ConnectParams{Src: clientIP, Dst: port})
			connected <- err
		}()
		req, err := l.Accept()
		must(t, err)
		go cancel()
		must(t, req.Reject(nil))
		if err := <-connected; !errors.Is(err, context.Canceled) {
			t.Fatalf("Connect: %v", err)
		}
	}
}
