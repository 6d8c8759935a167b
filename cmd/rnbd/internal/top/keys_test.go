package top

import (
	"slices"
	"testing"
	"time"
)

func TestDecode(t *testing.T) {
	for _, test := range []struct {
		in    string
		final bool
		want  []Key
		rest  string
	}{
		{"qd é界", false, []Key{'q', 'd', ' ', 'é', '界'}, ""},
		{"\r\n\x7f\x08\x15", false, []Key{Enter, Enter, Erase, Erase, EraseAll}, ""},
		{"\x1b[A\x1b[B\x1bOA\x1b[5~\x1b[6~\x1b[H\x1b[F\x1b[1~\x1b[4~", false, []Key{Up, Down, Up, PageUp, PageDown, Home, End, Home, End}, ""},
		{"\x1b[1;5Cx\x1b[200~", false, []Key{'x'}, ""}, // without a use
		{"a\x1b", false, []Key{'a'}, "\x1b"},
		{"a\x1b[", false, []Key{'a'}, "\x1b["},
		{"\x1b", true, []Key{Escape}, ""},
		{"\x1b[", true, []Key{Escape, '['}, ""},
		{"\x1bx", false, []Key{Escape, 'x'}, ""},
		{"\xe7\x95", false, nil, "\xe7\x95"},
		{"\xe7\x95", true, nil, ""},
		{"\xffq\x00\x01", false, []Key{'q'}, ""},
		{"\x1b[11111111111111111", false, slices.Concat([]Key{Escape, '['}, slices.Repeat([]Key{'1'}, 17)), ""},
	} {
		keys, rest := Decode([]byte(test.in), test.final)
		if !slices.Equal(keys, test.want) || string(rest) != test.rest {
			t.Errorf("%q is %v and %q, want %v and %q", test.in, keys, rest, test.want, test.rest)
		}
	}
}

// FuzzDecode cuts input anywhere: the keys are the same as those of the whole.
func FuzzDecode(f *testing.F) {
	f.Add([]byte("q\x1b[A界"), 3)
	f.Add([]byte("\x1b\x1b[5~\xff"), 1)
	f.Fuzz(func(t *testing.T, in []byte, at int) {
		whole, end := Decode(in, true)
		if len(end) > 0 {
			t.Fatalf("%q leaves %q", in, end)
		}
		at = max(0, min(at, len(in)))
		first, rest := Decode(in[:at:at], false)
		if len(rest) >= maxSequence {
			t.Fatalf("%q keeps %q", in[:at], rest)
		}
		second, end := Decode(append(slices.Clone(rest), in[at:]...), true)
		if got := append(first, second...); !slices.Equal(got, whole) || len(end) > 0 {
			t.Fatalf("%q cut at %d is %v, whole %v", in, at, got, whole)
		}
	})
}

func TestKeys(t *testing.T) {
	s := NewState("", "", "")
	pressed(s, 'p')
	if s.View != "paths" {
		t.Errorf("p shows %s", s.View)
	}
	pressed(s, 'e', 's', 'r') // events have no order to choose
	if s.View != "events" {
		t.Errorf("e shows %s", s.View)
	}
	pressed(s, 'd', ' ')
	if s.View != "devices" || !s.Paused || s.Quit {
		t.Errorf("after d and space: %+v", s)
	}
	pressed(s, ' ', '/', 'q', ' ', 'd', 'é', Erase)
	if s.Paused || s.Quit || !s.Typing || s.Filter != "q d" {
		t.Errorf("while a filter is typed: %+v", s)
	}
	pressed(s, EraseAll, Erase, 'w', Enter)
	if s.Typing || s.Filter != "w" {
		t.Errorf("after enter: %+v", s)
	}
	pressed(s, Escape)
	if s.Filter != "" {
		t.Errorf("after escape the filter is %q", s.Filter)
	}
	if pressed(s, 'q'); !s.Quit {
		t.Error("q does not end it")
	}
}

// TestSortGoesThroughAllColumns presses s until the first column is back.
func TestSortGoesThroughAllColumns(t *testing.T) {
	for _, view := range []string{"devices", "paths"} {
		s := NewState(view, "", "")
		at, seen := s.sort[view].column, map[string]bool{}
		for range Columns(view) {
			seen[pressed(s, 's').sort[view].column] = true
			Screen(s, client(0, 1), client(1, 2), time.Second, Size{Width: 80, Height: 24})
		}
		if len(seen) != len(Columns(view)) || s.sort[view].column != at {
			t.Errorf("%s: %d of %d columns, then %s", view, len(seen), len(Columns(view)), s.sort[view].column)
		}
		if pressed(s, 's', 'S'); s.sort[view].column != at {
			t.Errorf("%s: S goes to %s", view, s.sort[view].column)
		}
	}
}

// TestScrollStaysInBounds scrolls a thousand rows to both ends.
func TestScrollStaysInBounds(t *testing.T) {
	s, now, to := NewState("", "device", ""), many(0, 10), Size{Width: 80, Height: 24}
	last := func() string { l := Screen(s, nil, now, time.Second, to); return l[len(l)-2][:8] }
	first := last()
	for _, step := range []struct {
		keys []Key
		want bool // the first page
	}{{[]Key{Up, PageUp}, true}, {[]Key{Down}, false}, {[]Key{Up}, true}, {[]Key{End, Down, PageDown}, false}, {[]Key{Home}, true}} {
		pressed(s, step.keys...)
		if got := last(); (got == first) != step.want {
			t.Errorf("after %v the last row is %s, at the start %s", step.keys, got, first)
		}
	}
}
