package mcast

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/ipoib/wire"
)

var (
	start = time.Unix(1700000000, 0)
	link  = wire.Link{PKey: 0xffff, Scope: wire.ScopeLinkLocal}
	bcast = link.Broadcast()
)

func gid(s string) wire.GID {
	g, err := link.Multicast(netip.MustParseAddr(s))
	if err != nil {
		panic(err)
	}
	return g
}

// ready returns a table with the broadcast group joined.
func ready(t *testing.T) *Table {
	t.Helper()
	tab := New(start, bcast)
	if got := tab.Requests(start); !slices.Equal(got, []Request{{Join, bcast}}) {
		t.Fatalf("requests of a new table: %v", got)
	}
	tab.Joined(bcast)
	return tab
}

func TestBroadcastComesFirst(t *testing.T) {
	tab := New(start, bcast)
	tab.Add(start, gid("224.0.0.1"))
	if tab.Ready() {
		t.Error("ready before the broadcast group is joined")
	}
	if got := tab.Requests(start); !slices.Equal(got, []Request{{Join, bcast}}) {
		t.Fatalf("requests %v, want the broadcast group alone", got)
	}
	if got := tab.Requests(start.Add(time.Hour)); len(got) != 0 {
		t.Errorf("requests %v while one is under way", got)
	}
	tab.Joined(bcast)
	if got := tab.Requests(start); !slices.Equal(got, []Request{{Join, gid("224.0.0.1")}}) || !tab.Ready() {
		t.Errorf("requests %v after the broadcast group", got)
	}
}

func TestSendOnlyJoinQueues64(t *testing.T) {
	tab, g := ready(t), gid("239.1.2.3")
	for i := range 70 {
		if tab.Send(start, g, fmt.Append(nil, i)) {
			t.Fatal("a group that is not joined can be sent to")
		}
	}
	if got := tab.Requests(start); !slices.Equal(got, []Request{{JoinSendOnly, g}}) {
		t.Fatalf("requests %v", got)
	}
	frames := tab.Joined(g)
	if len(frames) != 64 || string(frames[0]) != "0" || string(frames[63]) != "63" || tab.Stats().QueueDrops != 6 {
		t.Errorf("%d frames waited, %d were dropped; want 64 and 6", len(frames), tab.Stats().QueueDrops)
	}
	if !tab.Send(start, g, nil) {
		t.Error("a joined group cannot be sent to")
	}
	// A full join replaces a send-only join of the same group.
	tab.Add(start, g)
	if got := tab.Requests(start); !slices.Equal(got, []Request{{Join, g}}) {
		t.Errorf("requests %v after Add", got)
	}
}

func TestBackoff(t *testing.T) {
	tab, g := ready(t), gid("239.1.2.3")
	tab.Add(start, g)
	now := start
	var pauses []time.Duration
	for range 7 {
		if got := tab.Requests(now); !slices.Equal(got, []Request{{Join, g}}) {
			t.Fatalf("requests %v after pauses %v", got, pauses)
		}
		tab.Failed(now, g)
		next := tab.Next()
		if got := tab.Requests(next.Add(-1)); len(got) != 0 {
			t.Fatal("a join was tried again early")
		}
		pauses = append(pauses, next.Sub(now))
		now = next
	}
	s := time.Second
	if want := []time.Duration{s, 2 * s, 4 * s, 8 * s, 16 * s, 16 * s, 16 * s}; !slices.Equal(pauses, want) {
		t.Errorf("pauses %v, want %v", pauses, want)
	}
}

func TestRemoveLeaves(t *testing.T) {
	tab, g := ready(t), gid("239.1.2.3")
	tab.Add(start, g)
	tab.Requests(start)
	tab.Joined(g)
	tab.Remove(g)
	tab.Remove(bcast)
	if got := tab.Requests(start); !slices.Equal(got, []Request{{Leave, g}}) {
		t.Errorf("requests %v", got)
	}
	tab.Joined(g) // the answer to a join that is not wanted any more
	if len(tab.Groups()) != 1 || !tab.Ready() {
		t.Errorf("groups %v", tab.Groups())
	}
}

func TestFlushJoinsAgain(t *testing.T) {
	tab, g := ready(t), gid("239.1.2.3")
	tab.Add(start, g)
	tab.Requests(start)
	tab.Joined(g)
	if tab.Flush(start); tab.Ready() {
		t.Error("ready after a flush")
	}
	if got := tab.Requests(start); !slices.Equal(got, []Request{{Join, bcast}}) {
		t.Errorf("requests %v", got)
	}
}

func TestGroupsAreBounded(t *testing.T) {
	tab := ready(t)
	for i := range 3000 {
		g := bcast
		g[14], g[15] = byte(i>>8), byte(i)
		tab.Send(start.Add(time.Duration(i)), g, nil)
	}
	if n := len(tab.Groups()); n != maxGroups {
		t.Errorf("%d groups, want %d", n, maxGroups)
	}
	if !tab.Ready() || tab.Stats().Full != 3000-maxGroups+1 {
		t.Errorf("stats %+v", tab.Stats())
	}
}

func TestFileOfLinux(t *testing.T) {
	tab := ready(t)
	tab.Send(start, gid("239.1.2.3"), []byte("x"))
	var b strings.Builder
	if err := Write(&b, tab.Groups(), func(time.Time) uint64 { return 4294892418 }); err != nil {
		t.Fatal(err)
	}
	want := `GID: ff12:401b:ffff:0:0:0:ffff:ffff
  created: 4294892418
  queuelen:         0
  complete:       yes
  send_only:       no

GID: ff12:401b:ffff:0:0:0:f01:203
  created: 4294892418
  queuelen:         1
  complete:        no
  send_only:      yes

`
	if b.String() != want {
		t.Errorf("file\n%s\nwant\n%s", b.String(), want)
	}
}

func TestSnoop(t *testing.T) {
	ip4 := append([]byte{0x46, 9: 2, 19: 0}, 0x94, 4, 0, 0) // router alert
	ip6 := make([]byte, 48)
	ip6[0], ip6[6], ip6[40] = 0x60, 0, 58
	g4, g6 := netip.MustParseAddr("239.1.2.3"), netip.MustParseAddr("ff02::1:ff00:2")
	a4, a6 := g4.As4(), g6.As16()
	source := []byte{10, 0, 0, 1}
	cat := func(parts ...[]byte) []byte { return slices.Concat(parts...) }
	rec := func(kind byte, sources int) []byte { return []byte{kind, 0, 0, byte(sources)} }
	for name, tc := range map[string]struct {
		v6     bool
		packet []byte
		want   []Change
	}{
		"IGMPv2 report":            {false, cat([]byte{0x16, 0, 0, 0}, a4[:]), []Change{{g4, true}}},
		"IGMPv2 leave":             {false, cat([]byte{0x17, 0, 0, 0}, a4[:]), []Change{{g4, false}}},
		"IGMPv2 query":             {false, cat([]byte{0x11, 0, 0, 0}, a4[:]), nil},
		"IGMPv2 of a host":         {false, []byte{0x16, 0, 0, 0, 10, 0, 0, 1}, nil},
		"IGMPv3 change to ex":      {false, cat([]byte{0x22, 7: 1}, rec(4, 0), a4[:]), []Change{{g4, true}}},
		"IGMPv3 change to in":      {false, cat([]byte{0x22, 7: 1}, rec(3, 0), a4[:]), []Change{{g4, false}}},
		"IGMPv3 allow a source":    {false, cat([]byte{0x22, 7: 2}, rec(5, 1), a4[:], source, rec(6, 1), a4[:], source), []Change{{g4, true}}},
		"IGMPv3 two records":       {false, cat([]byte{0x22, 7: 2}, rec(3, 0), a4[:], rec(2, 0), a4[:]), []Change{{g4, false}, {g4, true}}},
		"IGMPv3 count too large":   {false, cat([]byte{0x22, 7: 9}, rec(4, 0), a4[:]), []Change{{g4, true}}},
		"IGMPv3 sources cut":       {false, cat([]byte{0x22, 7: 1}, rec(4, 9), a4[:]), nil},
		"MLDv1 report":             {true, cat([]byte{131, 7: 0}, a6[:]), []Change{{g6, true}}},
		"MLDv1 done":               {true, cat([]byte{132, 7: 0}, a6[:]), []Change{{g6, false}}},
		"MLDv2 report":             {true, cat([]byte{143, 7: 1}, rec(4, 0), a6[:]), []Change{{g6, true}}},
		"MLDv1 cut":                {true, cat([]byte{131, 7: 0}, a6[:8]), nil},
		"echo behind router alert": {true, cat([]byte{128, 7: 0}, a6[:]), nil},
	} {
		etherType, head := uint16(wire.TypeIPv4), ip4
		if tc.v6 {
			etherType, head = wire.TypeIPv6, ip6
		}
		if got := Snoop(etherType, append(slices.Clone(head), tc.packet...)); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

func FuzzSnoop(f *testing.F) {
	f.Add([]byte{0x46, 9: 2, 23: 0, 24: 0x22, 31: 1, 32: 4, 36: 239, 39: 1}, false)
	f.Fuzz(func(t *testing.T, b []byte, v6 bool) {
		etherType := uint16(wire.TypeIPv4)
		if v6 {
			etherType = wire.TypeIPv6
		}
		for _, c := range Snoop(etherType, b) {
			if _, err := link.Multicast(c.Group); err != nil || c.Group.Is4() == v6 {
				t.Errorf("%v is no group of the family: %v", c, err)
			}
		}
	})
}

// FuzzTable runs operations drawn from the input: whatever comes, a frame that
// the table took is given back or dropped and counted, and nothing is sent to a
// group that is not joined.
func FuzzTable(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
	f.Fuzz(func(t *testing.T, ops []byte) {
		tab, now := New(start, bcast), start
		taken, back := 0, 0
		for _, op := range ops {
			now = now.Add(300 * time.Millisecond)
			g := bcast
			if op>>4 != 0 {
				g[14], g[15] = 0, op>>4
			}
			switch op & 7 {
			case 0:
				tab.Add(now, g)
			case 1:
				tab.Remove(g)
			case 2, 3:
				if !tab.Send(now, g, []byte{op}) {
					taken++
				} else if i := slices.IndexFunc(tab.Groups(), func(x Group) bool { return x.MGID == g }); i < 0 || !tab.Groups()[i].Complete {
					t.Fatalf("%s can be sent to: %+v", g, tab.Groups())
				}
			case 4:
				tab.Requests(now)
			case 5:
				back += len(tab.Joined(g))
			case 6:
				tab.Failed(now, g)
			case 7:
				tab.Flush(now)
			}
		}
		waiting := 0
		for _, g := range tab.Groups() {
			waiting += g.Queued
		}
		if taken != back+waiting+int(tab.Stats().QueueDrops) {
			t.Errorf("%d frames taken: %d given back, %d wait, %d dropped", taken, back, waiting, tab.Stats().QueueDrops)
		}
	})
}
