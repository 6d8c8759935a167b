package report

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"
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
