package top

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/latency"
)

var update = flag.Bool("update", false, "write the screens of testdata")

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// histogram has n durations of us microseconds.
func histogram(us, n uint64) latency.Snapshot {
	return latency.Snapshot{Sum: us * 1000 * n, Buckets: []latency.Bucket{{Upper: us*1000 + 1, Count: n}}}
}

func mapped(name, session string, requests, bytes uint64) Device {
	return Device{
		Daemon: "client", ID: name, Name: name, Session: session, State: "open", Inflight: 3,
		Uses: map[string]Moved{"": {Read: bytes, Written: bytes / 4}},
		Stages: []Stage{
			{"frontend", histogram(150, requests)}, {"queue", histogram(9, requests)},
			{"wire", histogram(120, requests)}, {"wire", histogram(2500, requests/50)},
		},
	}
}

func exported(name string, requests uint64, users ...string) Device {
	d := Device{Daemon: "server", ID: "/srv/" + name, Name: name, Session: strings.Join(users, ","), State: "open", Inflight: -1, Uses: map[string]Moved{},
		Stages: []Stage{{"queue", histogram(4, requests)}, {"plugin", histogram(80, requests)}, {"disk", histogram(70, requests)}}}
	for _, u := range users {
		d.Uses[u] = Moved{Read: requests * 4096}
	}
	return d
}

func path(session string, id uint32, state string, bytes uint64) Path {
	return Path{Daemon: "client", Session: session, ID: id, State: state, Fabric: "iwarp", Address: fmt.Sprintf("10.0.%d.2@10.0.%d.1", id, id),
		Received: bytes, Sent: bytes / 4, Requests: int64(bytes / 4096), Inflight: 2, Latency: 85 * time.Microsecond, Reconnects: 1, Failovers: 12}
}

// client is a sample of a client daemon, seconds after the start, with a load of
// n requests.
func client(seconds int, n uint64) *Sample {
	broken := mapped("rnbd1", "web1@storage", 40, 4096)
	broken.State, broken.Failed, broken.Hung = "closed", 7+n/1000, 2
	down := path("web1@storage", 2, "reconnecting", 4096)
	down.LastError = "connection lost"
	return &Sample{
		Time:    start.Add(time.Duration(seconds) * time.Second),
		Daemons: []Daemon{{Kind: "client", Journal: 1}},
		Devices: []Device{mapped("rnbd0", "web1@storage", n, n*4096), broken, mapped("rnbd2", "web1@archive", n*3, n*65536)},
		Paths:   []Path{path("web1@storage", 1, "connected", n*4096), down, path("web1@archive", 1, "connected", n*65536)},
		Events:  []string{"2026-03-01T11:59:58.000Z client 1 device web1@storage rnbd0: init -> open", "2026-03-01T11:59:59.000Z client 2 path web1@storage 10.0.2.2@10.0.2.1%iwarp: connected -> reconnecting (connection lost)"},
	}
}

func server(seconds int, n uint64) *Sample {
	return &Sample{Time: start.Add(time.Duration(seconds) * time.Second), Daemons: []Daemon{{Kind: "server", Journal: 2}},
		Devices: []Device{exported("disk.img", n, "web1@storage", "web2@storage"), exported("idle.img", 5, "web1@storage")}}
}

func joined(all ...*Sample) *Sample {
	sum := &Sample{Time: all[0].Time}
	for _, s := range all {
		sum.Daemons, sum.Devices = append(sum.Daemons, s.Daemons...), append(sum.Devices, s.Devices...)
		sum.Paths, sum.Events = append(sum.Paths, s.Paths...), append(sum.Events, s.Events...)
	}
	return sum
}

func many(seconds int, n uint64) *Sample {
	s := &Sample{Time: start.Add(time.Duration(seconds) * time.Second), Daemons: []Daemon{{Kind: "client", Journal: 1}}}
	for i := range uint64(1000) {
		s.Devices = append(s.Devices, mapped(fmt.Sprintf("rnbd%d", i), "s", n*(i*7919%1000), n*i))
	}
	return s
}

func named(seconds int, n uint64) *Sample {
	s := client(seconds, n)
	for i, name := range []string{"データベース-東京", "re\u0301sume\u0301-ÄÖÜ-disk", "\x1b[31mred\u202e\n" + strings.Repeat("very-long-", 30)} {
		s.Devices[i].Name, s.Devices[i].Session = name, name+"@"+name
	}
	return s
}

func pressed(s *State, keys ...Key) *State {
	for _, k := range keys {
		s.Press(k)
	}
	return s
}

// sameName has a device of the client and one of the server under one name.
func sameName(s *Sample) *Sample {
	s.Devices[0].Name = "disk.img"
	return s
}

// ill is a sample of a daemon in which much needs attention.
func ill(s *Sample) *Sample {
	s.Daemons[0].Conditions = []Condition{
		{"device-closed", "rnbd1", "closed: the server refuses the device: " + strings.Repeat("no such file or directory, ", 12)},
		{"redundancy-lost", "web1@storage", "1 of 2 paths are connected; 10.0.2.2@10.0.2.1 is reconnecting: connection lost"},
		{"requests-hang", "rnbd1", "2 for up to 12s, stage wire 10.0.2.1:1234%iwarp"},
		{"plugin-down", "ublk", "restarting"},
	}
	return s
}

// TestNarrowScreensKeepKeysAndDigits has long names of which some differ in their middle
// only.
func TestNarrowScreensKeepKeysAndDigits(t *testing.T) {
	busy := func(seconds int, n uint64) *Sample {
		s := &Sample{Time: start.Add(time.Duration(seconds) * time.Second), Daemons: []Daemon{{Kind: "client", Journal: 1}}}
		for i, name := range []string{"postgres-primary-eu-01", "postgres-primary-eu-02", "postgres-01-primary-eu", "postgres-02-primary-eu",
			strings.Repeat("a", 60) + "1" + strings.Repeat("a", 60), strings.Repeat("a", 60) + "2" + strings.Repeat("a", 60)} {
			d := mapped(name, "session-of-"+name+"@storage", n+uint64(i), n*1234567)
			d.Failed, d.Inflight = 123456*n, 128
			s.Devices = append(s.Devices, d)
			p := path("session-of-"+name+"@storage", uint32(i), "connected", n*1234567)
			p.Address = "2001:db8:1234:5678::10" + fmt.Sprint(i) + "@2001:db8:1234:5678::20"
			s.Paths = append(s.Paths, p)
		}
		return s
	}
	before, now := busy(0, 1000), busy(1, 98765)
	for _, view := range []string{"devices", "paths"} {
		whole := strings.Join(Screen(NewState(view, "", ""), before, now, time.Second, Size{}), " ")
		numbers := map[string]bool{}
		for _, w := range strings.Fields(whole) {
			numbers[w] = true
		}
		for _, width := range []int{80, 100, 120} {
			lines := Screen(NewState(view, "", ""), before, now, time.Second, Size{Width: width, Height: 24})
			inBounds(t, lines, Size{Width: width, Height: 24})
			keys, head := map[string]bool{}, 0
			for i, l := range lines {
				if strings.HasPrefix(l, "DEVICE") || strings.HasPrefix(l, "PATH") {
					head = i
				}
				if head == 0 || i == head || !strings.Contains(l, "connected") && !strings.Contains(l, "open") {
					continue
				}
				words := strings.Fields(l)
				keys[words[0]] = true
				for _, w := range words[1:] {
					if !numbers[w] && strings.ContainsAny(w[:1], "0123456789") {
						t.Errorf("%s at %d columns: %q is no whole number\n%s", view, width, w, strings.Join(lines, "\n"))
					}
				}
			}
			if len(keys) != len(now.Devices) {
				t.Errorf("%s at %d columns: %d different keys, want %d\n%s", view, width, len(keys), len(now.Devices), strings.Join(lines, "\n"))
			}
		}
	}
}

func away(s *Sample) *Sample {
	return &Sample{Time: s.Time, Daemons: []Daemon{{Kind: "client", Err: "connect /run/rnbd/client.sock: connection refused"}}, Events: s.Events}
}

func journal(s *Sample, n uint64) *Sample {
	s.Daemons[0].Journal = n
	return s
}

// TestScreens compares screens with those of testdata. go test -update writes them.
func TestScreens(t *testing.T) {
	devices := func() *State { return NewState("", "", "") }
	terminal, plain := Size{Width: 80, Height: 24}, Size{}
	for _, test := range []struct {
		name        string
		state       *State
		before, now *Sample
		size        Size
	}{
		{"first", devices(), nil, client(0, 1000), terminal},
		{"devices", devices(), client(0, 1000), client(1, 21000), terminal},
		{"devices-color", devices(), client(0, 1000), client(1, 21000), Size{Width: 80, Height: 12, Color: true}},
		{"devices-wide", devices(), client(0, 1000), client(2, 21000), Size{Width: 132, Height: 12}},
		{"devices-narrow", devices(), client(0, 1000), client(1, 21000), Size{Width: 40, Height: 12}},
		{"devices-tiny", devices(), client(0, 1000), client(1, 21000), Size{Width: 11, Height: 9}},
		{"devices-plain", devices(), client(0, 1000), client(1, 21000), plain},
		{"server", devices(), server(0, 100), server(1, 5100), terminal},
		{"both", devices(), joined(client(0, 1000), server(0, 100)), joined(client(1, 21000), server(1, 5100)), terminal},
		{"both-plain", devices(), joined(client(0, 1000), server(0, 100)), joined(client(1, 21000), server(1, 5100)), plain},
		{"paths", NewState("paths", "", ""), client(0, 1000), client(1, 21000), terminal},
		{"paths-plain", NewState("paths", "rx", ""), client(0, 1000), client(1, 21000), plain},
		{"events", NewState("events", "", ""), client(0, 1000), client(1, 21000), terminal},
		{"events-filter", NewState("events", "", "DEVICE"), client(0, 1000), client(1, 21000), plain},
		{"names", devices(), named(0, 1000), named(1, 21000), terminal},
		{"names-narrow", devices(), named(0, 1000), named(1, 21000), Size{Width: 34, Height: 12}},
		{"no-devices", devices(), nil, &Sample{Time: start, Daemons: []Daemon{{Kind: "client", Journal: 1}}}, terminal},
		{"thousand", devices(), many(0, 10), many(1, 20), terminal},
		{"thousand-end", pressed(devices(), 's', 'S', 'r', End), many(0, 10), many(1, 20), terminal},
		{"thousand-filter", pressed(devices(), '/', 'd', '9', '9'), many(0, 10), many(1, 20), terminal},
		{"sort-reversed", pressed(devices(), 's', 'r'), client(0, 1000), client(1, 21000), plain},
		{"filter-none", NewState("", "", "nothing"), client(0, 1000), client(1, 21000), plain},
		{"paused", pressed(devices(), ' '), client(0, 1000), client(1, 21000), Size{Width: 80, Height: 10}},
		{"counters-again", devices(), client(0, 21000), client(1, 1000), plain},
		{"daemon-restarted", devices(), client(0, 1000), journal(client(1, 21000), 9), plain},
		{"daemon-away", devices(), client(0, 1000), away(client(1, 0)), terminal},
		{"daemon-back", devices(), away(client(0, 0)), client(1, 21000), plain},
		{"same-name", devices(), nil, sameName(joined(client(1, 21000), server(1, 5100))), terminal},
		{"conditions", devices(), client(0, 1000), ill(client(1, 21000)), terminal},
		{"conditions-color", devices(), client(0, 1000), ill(client(1, 21000)), Size{Width: 100, Height: 16, Color: true}},
		{"conditions-few-lines", pressed(devices(), End), client(0, 1000), ill(client(1, 21000)), Size{Width: 80, Height: 9}},
		{"one-of-two-away", devices(), joined(client(0, 1000), server(0, 100)), joined(away(client(1, 0)), server(1, 5100)), terminal},
	} {
		t.Run(test.name, func(t *testing.T) {
			lines := Screen(test.state, test.before, test.now, time.Second, test.size)
			inBounds(t, lines, test.size)
			file := filepath.Join("testdata", test.name+".golden")
			got := strings.ReplaceAll(strings.Join(lines, "\n")+"\n", "\x1b", "ESC")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("%s differs; go test -update writes it. Now it is:\n%s", file, got)
			}
		})
	}
}

var colors = regexp.MustCompile("\x1b\\[[0-9]+m")

// inBounds checks that lines fit the size, and have nothing that a terminal obeys but
// colours where they are allowed.
func inBounds(t *testing.T, lines []string, to Size) {
	t.Helper()
	if to.Height > 0 && len(lines) != to.Height {
		t.Errorf("%d lines on a screen of %d", len(lines), to.Height)
	}
	for _, l := range lines {
		if to.Color {
			l = colors.ReplaceAllString(l, "")
		}
		if clean(l) != l {
			t.Errorf("line %q has control characters", l)
		}
		if to.Width > 0 && size(l) > to.Width {
			t.Errorf("line %q has %d columns of %d", l, size(l), to.Width)
		}
	}
}

// TestEverySizeHolds draws all views on screens of all sizes, and of names of all kinds.
func TestEverySizeHolds(t *testing.T) {
	for _, view := range Views {
		for width := 1; width <= 140; width += 1 + width/20 {
			for _, height := range []int{1, 2, 5, 7, 24} {
				for _, color := range []bool{false, true} {
					to := Size{Width: width, Height: height, Color: color}
					inBounds(t, Screen(NewState(view, "", ""), named(0, 1000), named(1, 21000), time.Second, to), to)
					inBounds(t, Screen(NewState(view, "", ""), client(0, 1000), ill(client(1, 21000)), time.Second, to), to)
					both := joined(away(client(1, 0)), server(1, 5100))
					inBounds(t, Screen(NewState(view, "", "x"), joined(client(0, 1), server(0, 100)), both, time.Second, to), to)
				}
			}
		}
	}
}

// FuzzScreen draws names of any bytes.
func FuzzScreen(f *testing.F) {
	f.Add("rnbd0", "s", 80, 24)
	f.Add("\x1b]0;title\a", "\u202e\ufe0f\U0001f468\u200d\U0001f469", 9, 8)
	f.Add("\xff\xfe", strings.Repeat("界", 50), 33, 9)
	f.Fuzz(func(t *testing.T, name, other string, width, height int) {
		to := Size{Width: 1 + (width&0x7fffffff)%200, Height: 1 + (height&0x7fffffff)%50}
		for _, view := range Views {
			now := client(1, 21000)
			now.Devices[0].Name, now.Devices[1].State, now.Paths[0].Session = name, other, name
			now.Events = append(now.Events, name+other)
			inBounds(t, Screen(NewState(view, "", ""), client(0, 1), now, time.Second, to), to)
		}
	})
}

// TestASampleStaysAsItIs draws two screens of the same samples.
func TestASampleStaysAsItIs(t *testing.T) {
	before, now := client(0, 1000), client(1, 21000)
	one := Screen(NewState("", "", ""), before, now, time.Second, Size{})
	two := Screen(NewState("", "", ""), before, now, time.Second, Size{})
	if strings.Join(one, "\n") != strings.Join(two, "\n") {
		t.Errorf("first\n%s\nthen\n%s", strings.Join(one, "\n"), strings.Join(two, "\n"))
	}
}

func BenchmarkThousandDevices(b *testing.B) {
	before, now, s := many(0, 10), many(1, 20), NewState("", "", "")
	b.ReportAllocs()
	for b.Loop() {
		Screen(s, before, now, time.Second, Size{Width: 80, Height: 24})
	}
}
