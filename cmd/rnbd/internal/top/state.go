package top

import (
	"slices"
	"unicode/utf8"
)

// Views are the screens that there are.
var Views = []string{"devices", "paths", "events"}

// State is the choice of the user.
type State struct {
	View   string
	Filter string
	Paused bool
	Quit   bool
	Typing bool // a filter

	sort   map[string]order
	offset int // rows that are above the screen
	page   int // rows that fit on it
}

// order is that of the rows of a view.
type order struct {
	column   string
	reversed bool // not the column's own order
}

// NewState returns the state at the start, with a view and a column to sort by; empty:
// those that are usual. Both were checked.
func NewState(view, sort, filter string) *State {
	s := &State{View: "devices", Filter: filter, sort: map[string]order{
		"devices": {column: "iops"}, "paths": {column: "path"},
	}}
	if view != "" {
		s.View = view
	}
	if sort != "" {
		s.sort[s.View] = order{column: sort}
	}
	return s
}

// Press changes the state as key says.
func (s *State) Press(key Key) {
	switch {
	case s.scroll(key):
	case s.Typing:
		s.typed(key)
	default:
		s.command(key)
	}
}

// typed changes the filter.
func (s *State) typed(key Key) {
	s.offset = 0
	switch key {
	case Enter:
		s.Typing = false
	case Escape:
		s.Typing, s.Filter = false, ""
	case Erase:
		_, n := utf8.DecodeLastRuneInString(s.Filter)
		s.Filter = s.Filter[:len(s.Filter)-n]
	case EraseAll:
		s.Filter = ""
	default:
		if key >= ' ' && len(s.Filter) < maxFilter {
			s.Filter += string(key)
		}
	}
}

// maxFilter bounds the bytes of a filter.
const maxFilter = 200

func (s *State) command(key Key) {
	switch key {
	case 'q', 'Q':
		s.Quit = true
	case 'd':
		s.View, s.offset = "devices", 0
	case 'p':
		s.View, s.offset = "paths", 0
	case 'e':
		s.View, s.offset = "events", 0
	case ' ':
		s.Paused = !s.Paused
	case '/':
		s.Typing = true
	case Escape:
		s.Filter, s.offset = "", 0
	case 's':
		s.nextSort(1)
	case 'S':
		s.nextSort(-1)
	case 'r':
		if o, ok := s.sort[s.View]; ok {
			o.reversed = !o.reversed
			s.sort[s.View] = o
		}
	}
}

// nextSort chooses the column behind, or before, the one that rows are sorted by.
func (s *State) nextSort(step int) {
	o, ok := s.sort[s.View]
	if !ok {
		return
	}
	names := Columns(s.View)
	i := slices.Index(names, o.column) + step
	s.sort[s.View], s.offset = order{column: names[(i+len(names))%len(names)]}, 0
}

// scroll reports whether key moves the rows. Screen keeps the offset in bounds.
func (s *State) scroll(key Key) bool {
	switch key {
	case Up:
		s.offset--
	case Down:
		s.offset++
	case PageUp:
		s.offset -= max(s.page, 1)
	case PageDown:
		s.offset += max(s.page, 1)
	case Home:
		s.offset = 0
	case End:
		s.offset = 1 << 30
	default:
		return false
	}
	s.offset = max(s.offset, 0)
	return true
}
