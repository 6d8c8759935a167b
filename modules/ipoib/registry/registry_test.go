package registry

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"reflect"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

var (
	portA = netip.MustParseAddr("127.0.0.1")
	portB = netip.MustParseAddr("127.0.0.2")
	quiet = slog.New(slog.DiscardHandler)
	all   = wire.Link{PKey: 0xffff, Scope: wire.ScopeLinkLocal}.Broadcast()
	store = wire.Link{PKey: 0x8001, Scope: wire.ScopeLinkLocal}.Broadcast()
)

func serve(t *testing.T, at string, cfg Config) *Server {
	t.Helper()
	var l net.Listener
	var err error
	eventually(t, "the address is free", func() bool {
		l, err = net.Listen("tcp", at)
		return err == nil
	})
	s, err := Serve(l, cfg, quiet)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func client(t *testing.T, s *Server, local netip.Addr) *Client {
	c := NewClient(ClientConfig{Server: netip.MustParseAddrPort(s.Addr().String()), Local: local, Logger: quiet})
	t.Cleanup(func() { c.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if _, err := c.PKeys(ctx); err != nil {
		t.Fatal(err)
	}
	return c
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not after 20 s", what)
		}
	}
}

func never() {}

func TestClient_MembersOfAGroup(t *testing.T) {
	s := serve(t, "127.0.0.1:0", Config{Partitions: []Partition{{PKey: 0xffff, QKey: 7, MTU: 4096}}})
	defer s.Close()
	a, b := client(t, s, portA), client(t, s, portB)
	g, err := a.Join("x", all, false, never)
	if err != nil || g.QKey != 7 || g.MTU != 4096 || g.PKey != 0xffff {
		t.Fatalf("%+v, %v", g, err)
	}
	if _, err := b.Join("y", all, true, never); err != nil { // sends only
		t.Fatal(err)
	}
	if m := b.Members(all); len(m) != 1 || m[0] != portA {
		t.Errorf("the sender knows %v, want the member", m)
	}
	if _, err := b.Join("y", all, false, never); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first member knows the second", func() bool { m := a.Members(all); return len(m) == 1 && m[0] == portB })
	b.Leave("y", all)
	eventually(t, "the first member is alone", func() bool { return len(a.Members(all)) == 0 })
	b.Join("y", all, false, never)
	b.Join("z", all, false, never)
	b.Leave("y", all)
	eventually(t, "another user of the port keeps the membership", func() bool { return len(a.Members(all)) == 1 })
}

// TestClient_LossOfTheRegistry: what is known stays, nothing new is joined, and
// another server without memory learns all.
func TestClient_LossOfTheRegistry(t *testing.T) {
	s := serve(t, "127.0.0.1:0", Config{})
	a, b := client(t, s, portA), client(t, s, portB)
	var lost atomic.Int32
	for _, c := range []*Client{a, b} {
		if _, err := c.Join("x", all, false, func() { lost.Add(1) }); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "both are members", func() bool { return len(a.Members(all)) == 1 && len(b.Members(all)) == 1 })
	at := s.Addr().String()
	s.Close()
	eventually(t, "the loss is noticed", func() bool { return !a.Connected() && !b.Connected() })
	if _, err := a.Join("x", store, false, never); !errors.Is(err, ErrUnreachable) || !errors.Is(err, syscall.ENETUNREACH) {
		t.Errorf("join without registry: %v", err)
	}
	if _, err := a.Join("y", all, false, never); err != nil {
		t.Errorf("another user of a group that the port is in: %v", err)
	}
	if len(a.Members(all)) != 1 {
		t.Error("the members were forgotten")
	}
	s = serve(t, at, Config{})
	eventually(t, "the new server knows both", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.table.Members(all)) == 2
	})
	if lost.Load() != 0 || a.Stats().Epochs != 2 {
		t.Errorf("%d memberships lost, %+v; want none, and 2 epochs", lost.Load(), a.Stats())
	}
	s.Close()
	s = serve(t, at, Config{Partitions: []Partition{{PKey: 0x8001}}}) // without the partition
	defer s.Close()
	eventually(t, "all users have lost their group", func() bool { return lost.Load() == 2 })
	if _, err := a.Join("x", all, false, never); !errors.Is(err, syscall.ENOENT) {
		t.Errorf("join: %v, want ENOENT", err)
	}
}

// TestChange: a partition that goes, or has other parameters, ends memberships
// in it alone. Watchers learn of each change.
func TestChange(t *testing.T) {
	s := serve(t, "127.0.0.1:0", Config{Partitions: []Partition{{PKey: 0xffff}, {PKey: 0x8001}}})
	defer s.Close()
	a, b := client(t, s, portA), client(t, s, portB)
	var lostAll, lostStore, calls atomic.Int32
	join := func(c *Client) error {
		_, err := c.Join("x", store, false, func() { lostStore.Add(1) })
		return err
	}
	for _, c := range []*Client{a, b} {
		c.Watch("x", func() { calls.Add(1) })
		if _, err := c.Join("x", all, false, func() { lostAll.Add(1) }); err != nil || join(c) != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "both are members", func() bool { return len(a.Members(store)) == 1 && len(b.Members(store)) == 1 })
	for _, step := range []struct {
		name   string
		change func(c *Config)
		lost   int32 // more than before
		want   error // of a join by b
		pkeys  int   // of b
	}{
		{"b is a limited member", func(c *Config) { c.Ports = map[netip.Addr][]uint16{portB: {0xffff, 1}} }, 1, syscall.EPERM, 2},
		{"b is no member", func(c *Config) { c.Ports[portB] = []uint16{0xffff} }, 0, syscall.EACCES, 1},
		{"b is a full member", func(c *Config) { c.Ports = nil }, 0, nil, 2},
		{"another Q_Key", func(c *Config) { c.Partitions[1].QKey = 9 }, 2, nil, 2},
		{"the partition is gone", func(c *Config) { c.Partitions = c.Partitions[:1] }, 2, syscall.ENOENT, 1},
		{"it is back", func(c *Config) { c.Partitions = append(c.Partitions, Partition{PKey: 1}) }, 0, nil, 2},
		{"nothing", func(*Config) {}, 0, nil, 2},
	} {
		lost, before := lostStore.Load(), calls.Load()
		if err := s.Change(func(c *Config) error { step.change(c); return nil }); err != nil {
			t.Fatalf("%s: %v", step.name, err)
		}
		eventually(t, step.name+": the watchers are called", func() bool { return calls.Load() == before+2 })
		if n := lostStore.Load() - lost; n != step.lost {
			t.Errorf("%s: %d memberships were lost, want %d", step.name, n, step.lost)
		}
		if err := join(b); !errors.Is(err, step.want) {
			t.Errorf("%s: join: %v, want %v", step.name, err, step.want)
		}
		if err := join(a); err != nil && !errors.Is(err, syscall.ENOENT) {
			t.Errorf("%s: join of the other port: %v", step.name, err)
		}
		if keys, err := b.PKeys(t.Context()); err != nil || len(keys) != step.pkeys {
			t.Errorf("%s: P_Keys %x, %v, want %d", step.name, keys, err, step.pkeys)
		}
	}
	if n := lostAll.Load(); n != 0 {
		t.Errorf("%d memberships in another partition were lost", n)
	}
	eventually(t, "both are members again", func() bool { return len(a.Members(store)) == 1 && len(b.Members(store)) == 1 })
	before := s.Config()
	for _, bad := range []func(c *Config){
		func(c *Config) { c.Partitions = append(c.Partitions, Partition{PKey: 0x8000}) },
		func(c *Config) { c.Partitions = append(c.Partitions, Partition{PKey: 1}) },
	} {
		if err := s.Change(func(c *Config) error { bad(c); return nil }); err == nil || !reflect.DeepEqual(s.Config(), before) {
			t.Errorf("a wrong configuration: %v; it is %+v", err, s.Config())
		}
	}
}

// TestTable_Rules: who may be a member of what.
func TestTable_Rules(t *testing.T) {
	tb, err := NewTable(Config{
		Partitions: []Partition{{PKey: 0xffff}, {PKey: 0x8001}, {PKey: 0x8002}},
		Ports:      map[netip.Addr][]uint16{portB: {0xffff, 0x0001}},
	})
	if err != nil {
		t.Fatal(err)
	}
	now := time.Unix(1000, 0)
	ga, gb := wire.AddrGID(portA), wire.AddrGID(portB)
	if _, _, err := tb.Join(now, ga, all, false); !errors.Is(err, syscall.ENOTCONN) {
		t.Errorf("join before hello: %v", err)
	}
	for _, c := range []struct {
		gid  wire.GID
		addr netip.Addr
		want error
	}{
		{ga, portA, nil},
		{gb, portB, nil},
		{gb, portA, syscall.EACCES}, // the GID of another port
		{wire.GID{0xfe, 0x80, 15: 1}, portA, syscall.EADDRINUSE}, // a second GID
		{wire.GID{0xfe, 0x80, 15: 1}, netip.MustParseAddr("127.0.0.3"), nil},
		{wire.GID{0xfe, 0x80, 15: 1}, netip.MustParseAddr("127.0.0.4"), syscall.EADDRINUSE},
	} {
		if _, err := tb.Hello(now, c.gid, c.addr); !errors.Is(err, c.want) {
			t.Errorf("hello %s at %s: %v, want %v", c.gid, c.addr, err, c.want)
		}
	}
	other := store
	other[1] = 0x15
	for _, c := range []struct {
		gid, mgid wire.GID
		want      error
	}{
		{ga, store, nil},
		{gb, store, syscall.EPERM}, // a limited member
		{gb, wire.Link{PKey: 0x8002, Scope: 2}.Broadcast(), syscall.EACCES},
		{ga, wire.Link{PKey: 0x8003, Scope: 2}.Broadcast(), syscall.ENOENT},
		{ga, other, syscall.EINVAL},
	} {
		if _, _, err := tb.Join(now, c.gid, c.mgid, false); !errors.Is(err, c.want) {
			t.Errorf("%s joins %s: %v, want %v", c.gid, c.mgid, err, c.want)
		}
	}
	for n := range MaxGroups + 10 {
		_, _, err = tb.Join(now, ga, wire.GID{0xff, 0x12, 0x40, 0x1b, 0xff, 0xff, 14: byte(n >> 8), 15: byte(n)}, false)
	}
	if !errors.Is(err, syscall.ENOSPC) || len(tb.groups) > MaxGroups {
		t.Errorf("%d groups, %v", len(tb.groups), err)
	}
	tb.Renew(now.Add(Lease/2), ga)
	tb.Hello(now, gb, portB)
	if changed := tb.Expire(now.Add(Lease)); len(changed) != 0 || len(tb.ports) != 1 {
		t.Errorf("after a lease: changed %v, %d ports, want the renewed one", changed, len(tb.ports))
	}
	if changed := tb.Expire(now.Add(2 * Lease)); len(changed) != MaxGroups || len(tb.groups) != 0 || len(tb.ports) != 0 {
		t.Errorf("%d groups changed, %d left", len(changed), len(tb.groups))
	}
}

func TestConfig_Refused(t *testing.T) {
	for _, p := range []Partition{{PKey: 0x8000}, {PKey: 1, QKey: 1 << 31}, {PKey: 1, MTU: 100}, {PKey: 1, Scope: 16}, {PKey: 1, SL: 16}} {
		if _, err := NewTable(Config{Partitions: []Partition{p}}); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %v", p, err)
		}
	}
	if _, err := NewTable(Config{Partitions: []Partition{{PKey: 1}, {PKey: 0x8001}}}); !errors.Is(err, syscall.ENOTUNIQ) {
		t.Errorf("a partition twice: %v, want ENOTUNIQ", err)
	}
}

// TestServer_BadInput: a bad request costs its own connection.
func TestServer_BadInput(t *testing.T) {
	s := serve(t, "127.0.0.1:0", Config{})
	defer s.Close()
	good := client(t, s, portA)
	for _, bad := range []string{"\n", "{}\n", `{"id":1,"op":"sing"}` + "\n", `{"id":1,"op":"join","mgid":"fe80::1"}` + "\n",
		`{"id":1,"op":"hello","gid":"ff12::1"}` + "\n", strings.Repeat("x", 1<<20), `{"id":1,"op":"renew"} {"id":2}` + "\n"} {
		c, err := net.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(20 * time.Second))
		go c.Write([]byte(bad))
		if b, err := io.ReadAll(c); len(b) != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%.40q: answered %q, %v", bad, b, err)
		}
		c.Close()
	}
	if _, err := good.Join("x", all, false, never); err != nil {
		t.Errorf("the other client: %v", err)
	}
}

// TestClient_Lies: answers that cannot be end the connection, and change nothing.
func TestClient_Lies(t *testing.T) {
	for _, lie := range []string{
		`{"epoch":1,"mgid":"` + all.String() + `","members":[{"gid":"ff12::1","addr":"127.0.0.3"}]}`,
		`{"epoch":1,"mgid":"` + all.String() + `","members":[{"gid":"fe80::1","addr":"224.0.0.1"}]}`,
		`{"epoch":1,"mgid":"` + all.String() + `","members":[{"gid":"fe80::1","addr":"::1"}]}`,
		`{"epoch":1,"mgid":"` + all.String() + `","members":[{"gid":"fe80::1","addr":"10.0.0.1"},{"gid":"fe80::2","addr":"10.0.0.1"}]}`,
		`{"epoch":1,"mgid":"fe80::1","members":[{"gid":"fe80::1","addr":"10.0.0.1"}]}`,
		`{"id":9,"epoch":1,"group":{"pkey":65535,"qkey":2147483648,"mtu":2048,"sl":0,"rate":0,"hop_limit":0}}`,
		`{"id":9,"epoch":1,"group":{"pkey":65535,"qkey":1,"mtu":4,"sl":0,"rate":0,"hop_limit":0}}`,
		`{"id":9,"epoch":1,"lease_ms":-5}`,
		`{"epoch":1,"errno":-1}`,
		`nonsense`,
	} {
		if _, err := decodeAnswer([]byte(lie), portA); !errors.Is(err, errLie) {
			t.Errorf("%s: %v", lie, err)
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Write([]byte("nonsense\n"))
			io.Copy(io.Discard, c)
			c.Close()
		}
	}()
	c := NewClient(ClientConfig{Server: netip.MustParseAddrPort(l.Addr().String()), Local: portA, Logger: quiet})
	defer c.Close()
	eventually(t, "the lie is counted", func() bool { return c.Stats().Lies > 1 })
}

// FuzzDecode: what is taken has a meaning, and survives its own form.
func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"id":1,"op":"hello","gid":"::ffff:127.0.0.1"}`))
	f.Add([]byte(`{"id":2,"op":"join","mgid":"` + all.String() + `","send_only":true}`))
	f.Add([]byte(`{"epoch":1,"mgid":"` + all.String() + `","members":[{"gid":"fe80::1","addr":"10.0.0.1"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if q, err := decodeRequest(b); err == nil {
			if again, err := decodeRequest(encodeLine(q)); err != nil || again != q {
				t.Errorf("%+v became %+v: %v", q, again, err)
			}
		}
		if a, err := decodeAnswer(b, portA); err == nil {
			for _, m := range a.Members {
				if m.Addr.IsMulticast() || m.GID.IsMulticast() {
					t.Errorf("member %+v", m)
				}
			}
			if _, err := decodeAnswer(encodeLine(a), portA); err != nil {
				t.Errorf("%+v does not survive: %v", a, err)
			}
		}
	})
}

// One address cannot keep others out: its oldest connections are closed in favour
// of its newest ones.
func TestServer_ConnectionsOfAnAddressAreBounded(t *testing.T) {
	s := serve(t, "127.0.0.1:0", Config{Partitions: []Partition{{PKey: 0xffff}}})
	defer s.Close()
	other := client(t, s, portB)
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IP(portA.AsSlice())}}
	var held []net.Conn
	for range 5 * maxSessionsPerAddr {
		c, err := dialer.Dial("tcp", s.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		held = append(held, c)
	}
	eventually(t, "the connections of the address are at their limit", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.conns) == maxSessionsPerAddr+1
	})
	held[0].SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := held[0].Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the oldest connection was not closed: %v", err)
	}
	if _, err := other.Join("x", all, false, never); err != nil {
		t.Errorf("another address cannot join: %v", err)
	}
	if _, err := client(t, s, portA).Join("y", all, false, never); err != nil {
		t.Errorf("a new connection of the address cannot join: %v", err)
	}
}
