package access

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/blk"
)

func rules(t testing.TB, list ...Rule) *Rules {
	t.Helper()
	r, err := New(list)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// from is a client with one path over iwarp from each address.
func from(addrs ...string) (c Client) {
	c.Session = "host-1"
	for _, a := range addrs {
		c.Paths = append(c.Paths, Path{netip.MustParseAddr(a), "iwarp"})
	}
	return c
}

func TestDecide(t *testing.T) {
	r := rules(t,
		Rule{Device: []string{"secret/**"}, Allow: "none"},
		Rule{Identity: []string{"spiffe://prod/*"}, Device: []string{"a/**"}, Allow: "rw"},
		Rule{Address: []string{"10.0.0.0/24", "10.1.0.7"}, Device: []string{"pub/*.img"}, Allow: "migration"},
		Rule{Fabric: []string{"iwarp"}, Device: []string{"pub/**"}, Allow: "ro"},
		Rule{Session: []string{"backup-*"}, Allow: "ro"},
	)
	alice := from("192.0.2.1")
	alice.Identities = []string{"alice", "spiffe://prod/alice"}
	backup := from("192.0.2.1")
	backup.Session = "backup-7"
	roce := from("192.0.2.1")
	roce.Paths[0].Fabric = "rocev2"
	for _, c := range []struct {
		name   string
		client Client
		device string
		mode   blk.AccessMode
		rule   int
		ok     bool
	}{
		{"first match decides", alice, "secret/a.img", blk.ReadOnly, 1, false},
		{"an identity of several", alice, "a/b/c.img", blk.ReadWrite, 2, true},
		{"more than a rule allows", alice, "a/b", blk.Migration, 2, false},
		{"no identity", from("192.0.2.1"), "a/b", blk.ReadOnly, 0, false},
		{"a range", from("10.0.0.200"), "pub/x.img", blk.Migration, 3, true},
		{"an address", from("10.1.0.7"), "pub/x.img", blk.ReadWrite, 3, true},
		{"an address in IPv6 form", from("::ffff:10.1.0.7"), "pub/x.img", blk.ReadWrite, 3, true},
		{"one path outside", from("10.0.0.200", "192.0.2.1"), "pub/x.img", blk.ReadWrite, 4, false},
		{"one path outside may read", from("10.0.0.200", "192.0.2.1"), "pub/x.img", blk.ReadOnly, 4, true},
		{"* is one word", from("10.0.0.200"), "pub/y/x.img", blk.ReadWrite, 4, false},
		{"another fabric", roce, "pub/x.img", blk.ReadOnly, 0, false},
		{"no paths", Client{}, "pub/x.img", blk.ReadOnly, 0, false},
		{"a session name", backup, "z.img", blk.ReadOnly, 5, true},
		{"a session name does not write", backup, "z.img", blk.ReadWrite, 5, false},
		{"no rule", from("192.0.2.1"), "z.img", blk.ReadOnly, 0, false},
		{"a leading slash", backup, "/secret/a.img", blk.ReadOnly, 1, false},
		{"a dot", backup, "./secret//a.img", blk.ReadOnly, 1, false},
		{"a dot inside", backup, "secret/./a.img", blk.ReadOnly, 1, false},
		{"two dots", backup, "x/../secret/a.img", blk.ReadOnly, 0, false},
		{"a new line", backup, "x\nsecret/a.img", blk.ReadOnly, 0, false},
		{"an unknown mode", backup, "x", 3, 0, false},
		{"an unknown mode of a large number", backup, "x", 255, 0, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := r.Decide(c.client, c.device, c.mode)
			if d.Allowed != c.ok || d.Rule != c.rule || d.Why == "" {
				t.Errorf("got %+v, want rule %d, allowed %t", d, c.rule, c.ok)
			}
		})
	}
}

func TestNoRulesAllowEverything(t *testing.T) {
	var none *Rules
	for _, r := range []*Rules{none, rules(t)} {
		if d := r.Decide(Client{}, "x", blk.Migration); !d.Allowed || d.Rule != 0 {
			t.Errorf("got %+v", d)
		}
	}
}

// The text of a client's identity is never a pattern. It matches only patterns
// that are written for it.
func TestIdentitiesAreNoPatterns(t *testing.T) {
	r := rules(t, Rule{Identity: []string{"spiffe://prod/alice"}, Allow: "rw"}, Rule{Identity: []string{"**"}, Allow: "ro"})
	for _, c := range []struct {
		id   string
		rule int
	}{
		{"spiffe://prod/alice", 1}, {"*", 2}, {"**", 2}, {"spiffe://prod/*", 2}, {"[a-z]", 2}, {"spiffe://prod/alice/", 2},
		{"", 0}, {"spiffe://prod/alice\n", 0}, {"a\x00b", 0}, {"\xff", 0}, {"\u0085", 0},
	} {
		d := r.Decide(Client{Identities: []string{c.id}}, "x", blk.ReadOnly)
		if d.Rule != c.rule || d.Allowed != (c.rule != 0) {
			t.Errorf("%q: %+v, want rule %d", c.id, d, c.rule)
		}
	}
	if d := rules(t, Rule{Session: []string{"*"}, Allow: "rw"}).Decide(Client{}, "x", blk.ReadOnly); d.Allowed {
		t.Error("a session without a name fits *")
	}
}

// A rule that is written wrongly is an error: never one that fits less, or more,
// than its author meant.
func TestRulesThatAreWrittenWrongly(t *testing.T) {
	for _, c := range []struct {
		rule  Rule
		field string
		want  string
	}{
		{Rule{}, "allow", "write none, ro, rw or migration"},
		{Rule{Allow: "RW"}, "allow", "write none, ro, rw or migration"},
		{Rule{Allow: "rw", Device: []string{""}}, "device", "it is empty"},
		{Rule{Allow: "rw", Device: []string{"a/[b"}}, "device", "bracket"},
		{Rule{Allow: "rw", Device: []string{"a**/b"}}, "device", "stands alone"},
		{Rule{Allow: "rw", Identity: []string{"a\nb"}}, "identity", "control characters"},
		{Rule{Allow: "rw", Session: []string{strings.Repeat("a", 5000)}}, "session", "longer than 4096"},
		{Rule{Allow: "rw", Address: []string{"10.0.0"}}, "address", "neither an address nor a range"},
		{Rule{Allow: "rw", Address: []string{"10.0.0.1/24"}}, "address", "write 10.0.0.0/24"},
		{Rule{Allow: "rw", Address: []string{"10.0.0.0/33"}}, "address", "neither an address nor a range"},
		{Rule{Allow: "rw", Address: []string{"::ffff:10.0.0.0/120"}}, "address", "without ::ffff"},
		{Rule{Allow: "rw", Fabric: []string{""}}, "fabric", "it is empty"},
	} {
		field, err := c.rule.Check()
		if err == nil || field != c.field || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: field %q, %v; want %s: %s", &c.rule, field, err, c.field, c.want)
		}
		if _, err := New([]Rule{{Allow: "ro"}, c.rule}); err == nil || !strings.HasPrefix(err.Error(), "rule 2: ") {
			t.Errorf("%s: New says %v", &c.rule, err)
		}
	}
}

func TestGlob(t *testing.T) {
	for _, c := range []struct {
		glob, s string
		want    bool
	}{
		{"**", "", true}, {"**", "a/b/c", true}, {"*", "a", true}, {"*", "a/b", false},
		{"a/**", "a", true}, {"a/**", "a/b", true}, {"a/**", "ab", false}, {"**/z", "z", true}, {"**/z", "a/b/z", true}, {"**/z", "a/zz", false},
		{"a/**/z", "a/z", true}, {"a/**/z", "a/b/c/z", true}, {"a/**/b/**/c", "a/x/b/y/b/c", true}, {"a/**/b/**/c", "a/x/y/c", false},
		{"[a-c]?.img", "bz.img", true}, {"[a-c]?.img", "dz.img", false}, {`\*`, "*", true}, {`\*`, "a", false},
	} {
		g, err := parseGlob(c.glob)
		if err != nil {
			t.Fatal(c.glob, err)
		}
		if g.match(c.s) != c.want {
			t.Errorf("%s fits %q: %t", c.glob, c.s, !c.want)
		}
	}
}

func TestManyRules(t *testing.T) {
	var list []Rule
	for i := range 10_000 {
		list = append(list, Rule{Identity: []string{fmt.Sprintf("tenant-%d", i)}, Device: []string{fmt.Sprintf("t%d/**", i)}, Allow: "rw"})
	}
	r := rules(t, list...)
	c := Client{Identities: []string{"tenant-9999"}}
	if d := r.Decide(c, "t9999/a.img", blk.ReadWrite); !d.Allowed || d.Rule != 10_000 {
		t.Errorf("own device: %+v", d)
	}
	if d := r.Decide(c, "t9998/a.img", blk.ReadOnly); d.Allowed {
		t.Errorf("another tenant's: %+v", d)
	}
}

func TestTooManyRules(t *testing.T) {
	list := make([]Rule, MaxRules+1)
	for i := range list {
		list[i].Allow = "rw"
	}
	if _, err := New(list); err == nil || !strings.Contains(err.Error(), "more than 100000") {
		t.Errorf("%d rules: %v", len(list), err)
	}
	if _, err := New(list[1:]); err != nil {
		t.Error(err)
	}
}

func BenchmarkDecide1000(b *testing.B) {
	var list []Rule
	for i := range 1000 {
		list = append(list, Rule{Identity: []string{fmt.Sprintf("tenant-%d", i)}, Device: []string{fmt.Sprintf("t%d/**", i)}, Allow: "rw"})
	}
	r, err := New(list)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		r.Decide(Client{Identities: []string{"tenant-999"}}, "t999/a.img", blk.ReadWrite)
	}
}

// FuzzRule: a rule that is accepted is the same when it is parsed again, and
// decides by its own words: it never allows more than it says, nor to a client
// without an identity if it names one.
func FuzzRule(f *testing.F) {
	f.Add("spiffe://prod/*", "10.0.0.0/24", "iwarp", "web-*", "a/**", "rw", int64(100), "spiffe://prod/a", "a/b")
	f.Add("", "::1", "", "", "**", "migration", int64(0), "", "x")
	f.Fuzz(func(t *testing.T, identity, address, fabric, session, device, allow string, iops int64, client, name string) {
		w := Rule{Allow: allow, Limits: Limits{IOPS: iops}}
		for _, field := range []struct {
			into  *[]string
			value string
		}{{&w.Identity, identity}, {&w.Address, address}, {&w.Fabric, fabric}, {&w.Session, session}, {&w.Device, device}} {
			if field.value != "" {
				*field.into = []string{field.value}
			}
		}
		field, err := w.Check()
		r, newErr := New([]Rule{w})
		if (err == nil) != (newErr == nil) || err != nil && field == "" {
			t.Fatalf("%s: Check %q, %v, New %v", &w, field, err, newErr)
		}
		if err != nil {
			return
		}
		c := from("10.0.0.1")
		if client != "" {
			c.Identities = []string{client}
		}
		for mode := range blk.AccessMode(4) {
			d := r.Decide(c, name, mode)
			if d.Allowed && (d.Rule != 1 || int(mode)+1 > slices.Index(levels, allow)) {
				t.Fatalf("%s: %+v for mode %d", &w, d, mode)
			}
			if d.Allowed && identity != "" && client == "" {
				t.Fatalf("%s: allowed without an identity", &w)
			}
			if d.Allowed && (!printable(name) || slices.Contains(strings.Split(name, "/"), "..")) {
				t.Fatalf("%s: allowed for %q", &w, name)
			}
		}
	})
}

// FuzzGlob compares the matcher with a slow one that tries everything.
func FuzzGlob(f *testing.F) {
	f.Add("a/**/b/*", "a/x/b/c")
	f.Add("**/**", "")
	f.Fuzz(func(t *testing.T, pattern, s string) {
		g, err := parseGlob(pattern)
		if err != nil || len(g) > 8 || strings.Count(s, "/") > 8 || !printable(s) {
			return
		}
		if got, want := g.match(s), tryAll(g, strings.Split(s, "/")); got != want {
			t.Errorf("%q fits %q: %t, want %t", pattern, s, got, want)
		}
	})
}

func tryAll(g glob, words []string) bool {
	switch {
	case len(g) == 0:
		return len(words) == 0
	case g[0] == anyWords:
		return tryAll(g[1:], words) || len(words) > 0 && tryAll(g, words[1:])
	}
	return len(words) > 0 && matchWord(g[0], words[0]) && tryAll(g[1:], words[1:])
}
