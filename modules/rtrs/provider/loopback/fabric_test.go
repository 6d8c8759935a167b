package loopback_test

import (
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/rnbd-go/rnbd/modules/rtrs/provider/loopback"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs"
	"github.com/rnbd-go/rnbd/modules/rtrs/verbs/verbstest"
)

// fabricPair connects two ends over a link that behaves like f.
func fabricPair(t *testing.T, n *loopback.Network, f loopback.Fabric) (client, server *end) {
	t.Helper()
	n.Behave(clientIP, serverIP, f)
	client, server = pair(t, n, clientIP)
	server.recvs(3)
	return client, server
}

// expectMemory compares the start of e's memory.
func expectMemory(t *testing.T, e *end, want string) {
	t.Helper()
	if got := string(e.mem[:len(want)]); got != want {
		t.Errorf("memory is %q, want %q", got, want)
	}
}

// Both fabrics pass the suite of all providers while nothing goes wrong. Keys rotate
// alike on all, see TestConformance.
func TestConformance_Fabrics(t *testing.T) {
	for name, f := range map[string]loopback.Fabric{"stream": loopback.Stream, "datagrams": loopback.Datagrams} {
		t.Run(name, func(t *testing.T) {
			verbstest.Run(t, func(*testing.T) verbstest.Fabric {
				n := loopback.New(loopback.WithCaps(loopback.AllCaps &^ verbs.CapKeyRotation))
				addr, addr6 := netip.MustParseAddrPort("127.0.0.1:0"), netip.MustParseAddrPort("[::1]:0")
				n.Behave(addr.Addr(), addr.Addr(), f)
				n.Behave(addr6.Addr(), addr6.Addr(), f)
				return verbstest.Fabric{Client: n.Device("client"), Server: n.Device("server"), Addr: addr, Addr6: addr6}
			})
		})
	}
}

// A message is sent while the link is stalled, its sender changes the memory, and
// then the link goes on.
func TestBehave_MemoryOfASlowMessage(t *testing.T) {
	for _, c := range []struct {
		fabric         loopback.Fabric
		stalled, after []string // completions of the sender
		arrives        string
	}{
		{loopback.Plain, nil, []string{"1 ok"}, "old"},
		{loopback.Stream, []string{"1 ok"}, nil, "old"},
		{loopback.Datagrams, nil, []string{"1 ok"}, "new"},
	} {
		t.Run(fmt.Sprint(c.fabric), func(t *testing.T) {
			n := loopback.New()
			client, server := fabricPair(t, n, c.fabric)
			n.Stall(clientIP, serverIP)
			client.write(server, 1, "old")
			expect(t, "client", client.drain(), c.stalled...)
			copy(client.mem, "new")
			expect(t, "server", server.drain())
			n.Resume(clientIP, serverIP)
			expect(t, "server", server.drain(), "imm 1")
			expect(t, "client", client.drain(), c.after...)
			expectMemory(t, server, c.arrives)
		})
	}
}

// A message is sent while the link is stalled, and its sender goes before the link
// goes on.
func TestBehave_MessageOfASenderThatHasGone(t *testing.T) {
	for _, c := range []struct {
		fabric  loopback.Fabric
		sender  []string
		arrives []string
		memory  string
	}{
		{loopback.Plain, []string{"1 status 1", "disconnected status 0"},
			[]string{"imm 1", "1001 status 1", "1002 status 1", "disconnected status 0"}, "bytes"},
		{loopback.Stream, []string{"1 ok", "disconnected status 0"},
			[]string{"imm 1", "1001 status 1", "1002 status 1", "disconnected status 0"}, "bytes"},
		{loopback.Datagrams, []string{"1 status 1", "disconnected status 0"},
			[]string{"1000 status 1", "1001 status 1", "1002 status 1", "disconnected status 0"}, "\x00\x00\x00\x00\x00"},
	} {
		t.Run(fmt.Sprint(c.fabric), func(t *testing.T) {
			n := loopback.New()
			client, server := fabricPair(t, n, c.fabric)
			n.Stall(clientIP, serverIP)
			client.write(server, 1, "bytes")
			sent := client.drain()
			client.qp.Disconnect()
			expect(t, "client", append(sent, client.drain()...), c.sender...)
			expect(t, "server", server.drain())
			n.Resume(clientIP, serverIP)
			expect(t, "server", server.drain(), c.arrives...)
			expectMemory(t, server, c.memory)
		})
	}
}

// What is on the link when a connection is cut arrives on a stream only.
func TestBehave_MessageOnTheLinkOfAConnectionThatIsCut(t *testing.T) {
	for _, c := range []struct {
		fabric  loopback.Fabric
		arrives []string
		memory  string
	}{
		{loopback.Plain, []string{"1000 status 1", "1001 status 1", "1002 status 1", "disconnected status 7"}, "\x00\x00"},
		{loopback.Stream, []string{"imm 1", "imm 2", "1002 status 1", "disconnected status 7"}, "b"},
		{loopback.Datagrams, []string{"1000 status 1", "1001 status 1", "1002 status 1", "disconnected status 7"}, "\x00\x00"},
	} {
		t.Run(fmt.Sprint(c.fabric), func(t *testing.T) {
			n := loopback.New()
			client, server := fabricPair(t, n, c.fabric)
			client.write(server, 1, "a")
			client.write(server, 2, "b")
			n.Cut(clientIP, serverIP)
			expect(t, "server", server.drain(), c.arrives...)
			expectMemory(t, server, c.memory)
		})
	}
}

// A cut of a stalled link loses all that is on it; what was placed stays placed.
func TestBehave_CutOfAStalledLink(t *testing.T) {
	for _, f := range []loopback.Fabric{loopback.Stream, loopback.Datagrams} {
		t.Run(fmt.Sprint(f), func(t *testing.T) {
			n := loopback.New()
			client, server := fabricPair(t, n, f)
			client.write(server, 1, "first")
			expect(t, "server", server.drain(), "imm 1")
			n.Stall(clientIP, serverIP)
			client.write(server, 2, "second")
			client.write(server, 3, "third")
			n.Cut(clientIP, serverIP)
			n.Resume(clientIP, serverIP)
			expect(t, "server", server.drain(), "1001 status 1", "1002 status 1", "disconnected status 7")
			expectMemory(t, server, "first")
		})
	}
}

// Messages keep their order, whichever of them was lost.
func TestBehave_MessagesArriveInOrder(t *testing.T) {
	for _, f := range []loopback.Fabric{loopback.Stream, loopback.Datagrams} {
		t.Run(fmt.Sprint(f), func(t *testing.T) {
			n := loopback.New()
			client, server := fabricPair(t, n, f)
			a, b := client.qp.LocalAddr(), client.qp.RemoteAddr()
			client.write(server, 1, "x")
			n.StallConn(a, b, true)
			client.write(server, 2, "y")
			expect(t, "server", server.drain()) // the first was sent before, and is late
			n.StallConn(a, b, false)
			client.write(server, 3, "z")
			expect(t, "server", server.drain(), "imm 1", "imm 2", "imm 3")
			expect(t, "client", client.drain(), "1 ok", "2 ok", "3 ok")
		})
	}
}

// A request whose acknowledgement is lost is executed once.
func TestBehave_LostAcknowledgement(t *testing.T) {
	for _, c := range []struct {
		fabric         loopback.Fabric
		stalled, after []string
	}{
		{loopback.Stream, []string{"1 ok"}, nil},
		{loopback.Datagrams, nil, []string{"1 ok"}},
	} {
		t.Run(fmt.Sprint(c.fabric), func(t *testing.T) {
			n := loopback.New()
			client, server := fabricPair(t, n, c.fabric)
			n.StallOneWay(serverIP, clientIP)
			client.write(server, 1, "x")
			expect(t, "server", server.drain(), "imm 1")
			expect(t, "client", client.drain(), c.stalled...)
			n.Resume(clientIP, serverIP)
			expect(t, "client", client.drain(), c.after...)
			expect(t, "server", server.drain())
		})
	}
}

// A lost message cannot be sent again once its memory is no longer registered.
func TestDatagrams_MemoryThatIsTakenBackEndsTheConnection(t *testing.T) {
	n := loopback.New()
	client, server := fabricPair(t, n, loopback.Datagrams)
	mem := []byte("lost")
	mr, err := client.pd.RegMR(mem, 0)
	must(t, err)
	n.Stall(clientIP, serverIP)
	_, err = client.qp.PostSend([]verbs.SendWR{{ID: 1, Op: verbs.OpWriteImm, Signaled: true,
		SGEs: []verbs.SGE{{Buf: mem, LKey: mr.LKey()}}, RemoteAddr: server.mr.Addr(), RKey: server.mr.RKey()}})
	must(t, err)
	client.cq.Flush()
	must(t, mr.Close())
	n.Resume(clientIP, serverIP)
	expect(t, "server", server.drain())
	expect(t, "client", client.drain(), "1 status 1", "disconnected status 7")
	expectMemory(t, server, "\x00\x00\x00\x00")
}

// What was sent before its sender went arrives late, on every fabric.
func TestBehave_LateMessageOfASenderThatHasGone(t *testing.T) {
	for _, f := range []loopback.Fabric{loopback.Plain, loopback.Stream, loopback.Datagrams} {
		t.Run(fmt.Sprint(f), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := loopback.New()
				client, server := fabricPair(t, n, f)
				n.Delay(clientIP, serverIP, time.Second)
				client.write(server, 1, "late")
				n.Crash(client.dev, false)
				time.Sleep(500 * time.Millisecond)
				expect(t, "server", server.drain())
				time.Sleep(time.Second)
				expect(t, "server", server.drain(), "imm 1")
				expectMemory(t, server, "late")
			})
		})
	}
}

// An end of a stream gives up when its peer gets nothing, though its requests are
// complete; a slow peer is no reason.
func TestStream_EndsWithoutProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := loopback.New(loopback.WithAckTimeout(7 * time.Second))
		client, server := fabricPair(t, n, loopback.Stream)
		client.write(server, 1, "x")
		time.Sleep(20 * time.Second) // the server does not look
		expect(t, "client", client.drain(), "1 ok")
		expect(t, "server", server.drain(), "imm 1")
		n.Stall(clientIP, serverIP)
		client.write(server, 2, "y")
		expect(t, "client", client.drain(), "2 ok")
		time.Sleep(6 * time.Second)
		expect(t, "client", client.drain())
		time.Sleep(2 * time.Second)
		expect(t, "client", client.drain(), "disconnected status 7")
	})
}

// A connection keeps the behaviour that its link had when it was made.
func TestBehave_IsOfConnectionsThatAreMadeLater(t *testing.T) {
	n := loopback.New()
	before, beforeServer := fabricPair(t, n, loopback.Plain)
	after, afterServer := fabricPair(t, n, loopback.Stream)
	other, otherServer := pair(t, n, otherIP)
	otherServer.recvs(1)
	for _, link := range []netip.Addr{clientIP, otherIP} {
		n.Stall(link, serverIP)
	}
	before.write(beforeServer, 1, "x")
	after.write(afterServer, 2, "x")
	other.write(otherServer, 3, "x")
	expect(t, "the connection from before", before.drain())
	expect(t, "the connection made later", after.drain(), "2 ok")
	expect(t, "the connection over another link", other.drain())
}
