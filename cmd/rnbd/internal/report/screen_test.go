package report

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/fit"
)

type row struct {
	name, state, where string
	size               Bytes
}

var rowFields = []Field[row]{
	F("name", "Name", "", func(r row) any { return r.name }),
	F("state", "State", "", func(r row) any { return r.state }),
	F("size", "Size", "", func(r row) any { return r.size }),
	F("where", "Where", "", func(r row) any { return r.where }),
}

var rows = []row{
	{"rnbd10", "open", "nbd+unix:///rnbd10?socket=/run/rnbd/nbd.sock", 1 << 30},
	{"rnbd9", "closed", "/dev/ublkb9", 2 << 20},
}

func shownAs(t *testing.T, o Options, rows []row) string {
	t.Helper()
	var b bytes.Buffer
	if err := List(&b, o, Build("rows", "row", rowFields, rows)); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestTablesFitTheirWidth(t *testing.T) {
	want := `Name    State   Size  Where
rnbd10  open      1G  nbd+unix:///rnbd1…
rnbd9   closed    2M  /dev/ublkb9
Total             1G
`
	if got := shownAs(t, Options{Width: 40}, rows); got != want {
		t.Errorf("got\n%s", got)
	}
	for width := 34; width <= 80; width++ {
		for _, l := range strings.Split(shownAs(t, Options{Width: width}, rows), "\n") {
			if n := utf8.RuneCountInString(l); n > width {
				t.Errorf("width %d: %d runes in %q", width, n, l)
			}
		}
	}
	if got := shownAs(t, Options{}, rows); !strings.Contains(got, rows[0].where) {
		t.Errorf("without a width it is shortened:\n%s", got)
	}
	if got := shownAs(t, Options{Width: 20}, rows); !strings.HasPrefix(got, "Name   rnbd10\nState  open\n") || !strings.Contains(got, "\n\nName   rnbd9\n") {
		t.Errorf("too narrow for a table:\n%s", got)
	}
}

var machineFields = []Field[row]{
	F("session", "Session", "", func(r row) any { return "web1@" + r.name }).As(Name),
	F("name", "Device", "", func(r row) any { return r.name }).As(Name),
	F("state", "State", "", func(r row) any { return r.state }).As(Exact),
	F("mode", "Access Mode", "", func(row) any { return "rw" }).As(Exact),
	F("size", "Size", "", func(r row) any { return r.size }),
	F("read", "Read", "", func(r row) any { return Count(r.size * 1021) }),
	F("where", "Where", "", func(r row) any { return r.where }).As(Exact),
}

// TestNarrowTablesLoseWholeColumns has names that differ at their begin, middle and end.
func TestNarrowTablesLoseWholeColumns(t *testing.T) {
	var long []row
	for _, name := range []string{"postgres-primary-eu-01", "postgres-primary-eu-02", "postgres-01-primary-eu", "postgres-02-primary-eu", "eu-postgres-primary-01"} {
		long = append(long, row{name, "reconnecting", "nbd+unix:///" + name + "?socket=/run/rnbd/nbd.sock", 123456789 << 10})
	}
	fields := make([]Field[row], len(machineFields))
	for i, f := range machineFields {
		f.Rank = map[string]int{"mode": 4, "where": 3, "session": 2, "read": 1}[f.Name]
		fields[i] = f
	}
	for _, width := range []int{60, 80, 100, 120, 200} {
		table := Build("rows", "row", fields, long)
		table.Rows[1].Notes = []string{"device-closed: the server of the device is away and nobody knows for how long it will be, " + strings.Repeat("or why, ", 9)}
		var b bytes.Buffer
		if err := List(&b, Options{Width: width, Screen: true}, table); err != nil {
			t.Fatal(err)
		}
		got := b.String()
		keys := map[string]bool{}
		for _, l := range strings.Split(got, "\n") {
			if n := fit.Width(l); n > width {
				t.Errorf("width %d: %d columns in %q", width, n, l)
			}
			if !strings.Contains(l, "reconnecting") {
				continue
			}
			if !strings.Contains(l, "117.7G") {
				t.Errorf("width %d: no whole size in %q", width, l)
			}
			keys[l] = true
		}
		if len(keys) != len(long) {
			t.Errorf("width %d: %d different rows, want %d\n%s", width, len(keys), len(long), got)
		}
		lost := map[int]string{60: "Session, Read, Where", 80: "Session, Where", 100: "Access Mode, Where", 120: "Where", 200: ""}[width]
		if width < 200 && !strings.Contains(got, "(no room for "+lost) || strings.Contains(got, "no room") != (lost != "") {
			t.Errorf("width %d: want no room for %q\n%s", width, lost, got)
		}
	}
}

func TestStatesHaveColours(t *testing.T) {
	got := shownAs(t, Options{Color: true, NoHeaders: true, NoTotals: true}, rows)
	if !strings.Contains(got, "rnbd10  \x1b[32mopen  \x1b[0m  1G") || !strings.Contains(got, "\x1b[31mclosed\x1b[0m") {
		t.Errorf("got %q", got)
	}
	if got := shownAs(t, Options{Color: true, Format: "csv"}, rows); strings.Contains(got, "\x1b") {
		t.Errorf("csv has colours: %q", got)
	}
}

func namesOf(rows []row) string {
	var out []string
	for _, r := range rows {
		out = append(out, r.name)
	}
	return strings.Join(out, " ")
}

func TestFilterAndSort(t *testing.T) {
	for _, c := range []struct {
		filter []string
		want   string
	}{
		{nil, "rnbd10 rnbd9"}, {[]string{"state=open"}, "rnbd10"}, {[]string{"state!=open"}, "rnbd9"}, {[]string{"where=/dev/*"}, "rnbd9"},
		{[]string{"where=*unix*nbd.sock"}, "rnbd10"}, {[]string{"name=rnbd?"}, "rnbd9"}, {[]string{"size=2097152"}, "rnbd9"}, {[]string{"name=*", "state=x"}, ""},
	} {
		got, err := Filter(rowFields, rows, c.filter)
		if err != nil || namesOf(got) != c.want {
			t.Errorf("%q: %s, %v", c.filter, namesOf(got), err)
		}
	}
	for _, bad := range []string{"", "state", "=x", "stat=x", "name=["} {
		if _, err := Filter(rowFields, rows, []string{bad}); err == nil {
			t.Errorf("filter %q is taken", bad)
		}
	}
	for by, want := range map[string]string{"": "rnbd10 rnbd9", "name": "rnbd10 rnbd9", "-name": "rnbd9 rnbd10", "size": "rnbd9 rnbd10", "-size": "rnbd10 rnbd9"} {
		if got, err := Sort(rowFields, rows, by); err != nil || namesOf(got) != want {
			t.Errorf("by %q: %s, %v", by, namesOf(got), err)
		}
	}
	if _, err := Sort(rowFields, rows, "siez"); err == nil || !strings.Contains(err.Error(), `did you mean "size"`) {
		t.Errorf("error %v", err)
	}
}
