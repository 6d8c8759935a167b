package fit

import (
	"strings"
	"testing"
)

func TestMiddle(t *testing.T) {
	for _, c := range []struct {
		text string
		n    int
		want string
	}{
		{"rnbd0", 5, "rnbd0"}, {"postgres-primary-01", 9, "post…y-01"}, {"postgres", 1, "…"}, {"postgres", 0, ""}, {"postgres", 2, "p…"},
		{"データベース", 7, "デ…ース"}, {"abcde\u0301f", 5, "ab…e\u0301f"},
	} {
		if got := Middle(c.text, c.n); got != c.want || Width(got) > c.n {
			t.Errorf("Middle(%q, %d) = %q, want %q", c.text, c.n, got, c.want)
		}
	}
}

// TestNamesStayDifferent has names that differ at their end, begin and middle.
func TestNamesStayDifferent(t *testing.T) {
	all := []string{"postgres-main-01", "postgres-main-02", "postgres-01-main", "postgres-02-main", "01-postgres-main", "postgres-main-01"}
	for n := 4; n < 18; n++ {
		seen := map[string]string{}
		for i, form := range Names(all, n) {
			if Width(form) > n {
				t.Errorf("%q has more than %d columns", form, n)
			}
			if of, taken := seen[form]; taken && of != all[i] {
				t.Errorf("%d columns: %s and %s are both %s", n, of, all[i], form)
			}
			seen[form] = all[i]
		}
	}
	if got := Distinct(all, 6, 40); got != 13 {
		t.Errorf("they differ in %d columns, want 13", got)
	}
	if got := Distinct(all, 6, 10); got != 10 {
		t.Errorf("at most 10 columns: %d", got)
	}
	if got := Distinct([]string{"a", "b"}, 8, 40); got != 8 {
		t.Errorf("short names take %d columns", got)
	}
}

func TestVerdict(t *testing.T) {
	things := []string{"device-closed rnbd1", "server-away web1@storage"}
	for _, c := range []struct {
		things []string
		n      int
		want   string
	}{
		{nil, -1, ""},
		{things, -1, "2 things need attention: device-closed rnbd1, server-away web1@storage"},
		{things[:1], 80, "1 thing needs attention: device-closed rnbd1"},
		{things, 60, "2 things need attention: device-closed rnbd1 and 1 more"},
		{things, 30, "2 things need attention"},
		{things, 10, "2 things …"},
	} {
		if got := Verdict(c.things, c.n); got != c.want {
			t.Errorf("%d columns: %q, want %q", c.n, got, c.want)
		}
	}
}

func TestJoinDropsWholeParts(t *testing.T) {
	parts := []string{"12 IOPS", "read 1.30G/s", "hung 2"}
	for n, want := range map[int]string{-1: "12 IOPS  read 1.30G/s  hung 2", 22: "12 IOPS  read 1.30G/s", 16: "12 IOPS  hung 2", 4: "12 …"} {
		if got := Join(parts, "  ", n); got != want {
			t.Errorf("%d columns: %q, want %q", n, got, want)
		}
	}
}

func FuzzWrap(f *testing.F) {
	f.Add("no path is left: connection refused", 9)
	f.Add("界界界 界", 3)
	f.Fuzz(func(t *testing.T, s string, n int) {
		s = strings.ToValidUTF8(s, "?")
		n = 2 + (n&0xffff)%100
		lines := Wrap(s, n)
		for _, l := range lines {
			if Width(l) > n {
				t.Errorf("line %q has more than %d columns", l, n)
			}
		}
		blanks := func(s string) string { return strings.Join(strings.Fields(s), "") }
		if got := blanks(strings.Join(lines, "")); got != blanks(s) {
			t.Errorf("%q became %q", s, got)
		}
	})
}
