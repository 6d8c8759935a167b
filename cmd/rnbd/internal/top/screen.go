package top

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Size is that of the screen.
type Size struct {
	Width  int // columns of the terminal; 0: as wide as the longest line
	Height int // lines; 0: as many as there are, without the line of keys
	Color  bool
}

// totals are those of all devices.
type totals struct {
	iops, read, written rate
	failed, hung        uint64
}

func (t *totals) add(d *Device, r deviceRates) {
	for _, p := range []struct {
		sum *rate
		r   rate
	}{{&t.iops, r.iops}, {&t.read, r.read}, {&t.written, r.written}} {
		p.sum.value += p.r.value
		p.sum.known = p.sum.known || p.r.known
	}
	t.failed, t.hung = t.failed+d.Failed, t.hung+d.Hung
}

// Screen returns the lines of a screen: the state in now, and the changes since
// before; before may be nil. No line is longer than the width, and there are no
// more lines than the height.
func Screen(s *State, before, now *Sample, every time.Duration, size Size) []string {
	i := between(before, now)
	devices, sum := deviceGrid(now, i)
	g := devices
	switch s.View {
	case "paths":
		g = pathGrid(now, i)
	case "events":
		g = nil
	}
	lines := s.summary(now, sum, every, size)
	foot := ""
	if size.Height > 0 {
		foot = s.foot()
	}
	if g == nil {
		lines = append(lines, s.events(now, size, len(lines))...)
	} else {
		if len(now.Daemons) == 1 {
			g.without("daemon")
		}
		lines = s.table(g, lines, size)
	}
	return fit(lines, foot, size)
}

// fit brings lines to the size, with foot in the last one.
func fit(lines []string, foot string, to Size) []string {
	if to.Height > 0 {
		lines = lines[:min(len(lines), max(to.Height-1, 0))]
		for len(lines) < to.Height-1 {
			lines = append(lines, "")
		}
		lines = append(lines, cut(foot, limit(to)))
	}
	return lines
}

// limit is the width for cut.
func limit(to Size) int {
	if to.Width == 0 {
		return -1
	}
	return to.Width
}

// summary are the lines above the view: the time, sums, and daemons that do not answer.
func (s *State) summary(now *Sample, sum totals, every time.Duration, size Size) (lines []string) {
	var kinds, errs []string
	for _, d := range now.Daemons {
		kinds = append(kinds, d.Kind)
		if d.Err != "" {
			errs = append(errs, "the "+d.Kind+" daemon does not answer: "+clean(d.Err))
		}
	}
	first := fmt.Sprintf("rnbd top %s  %s  every %s", now.Time.UTC().Format("2006-01-02T15:04:05Z"), strings.Join(kinds, " and "), every)
	if s.Paused {
		first += "  paused"
	}
	up := 0
	for i := range now.Paths {
		if now.Paths[i].State == "connected" {
			up++
		}
	}
	second := fmt.Sprintf("%s IOPS  read %s/s  write %s/s  failed %d  hung %d", sum.iops.number(), sum.read.bytes(), sum.written.bytes(), sum.failed, sum.hung)
	third := fmt.Sprintf("%s  %d of %d paths connected", plural(len(now.Devices), "device"), up, len(now.Paths))
	if o, ok := s.sort[s.View]; ok {
		third += "  by " + o.column
		if o.reversed {
			third += " reversed"
		}
	}
	if s.Filter != "" && !s.Typing {
		third += "  filter " + clean(s.Filter)
	}
	for _, l := range []string{first, second, third} {
		lines = append(lines, cut(l, limit(size)))
	}
	for _, e := range errs {
		e = cut(e, limit(size))
		if size.Color {
			e = paint(red, e)
		}
		lines = append(lines, e)
	}
	return append(lines, "")
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// table adds the rows that fit to lines.
func (s *State) table(g *grid, lines []string, size Size) []string {
	all := len(g.rows)
	g.filter(s.Filter)
	by := s.sort[s.View]
	g.sort(by)
	columns := g.layout(size.Width, by.column)
	above := heads(columns)
	for k := range above {
		above[k] = cut(above[k], limit(size))
	}
	from, to := s.window(len(g.rows), size, len(lines)+len(above))
	switch {
	case all == 0:
		above = []string{cut("no "+s.View, limit(size))}
	case len(g.rows) == 0:
		above = []string{cut("no "+strings.TrimSuffix(s.View, "s")+" fits the filter", limit(size))}
	}
	if to-from < len(g.rows) {
		lines[2] = cut(lines[2]+fmt.Sprintf("  rows %d-%d of %d", from+1, to, len(g.rows)), limit(size))
	}
	lines = append(lines, above...)
	for k := from; k < to; k++ {
		lines = append(lines, g.rows[k].line(columns, size.Color))
	}
	return lines
}

// window returns the rows on the screen below some lines.
func (s *State) window(rows int, size Size, above int) (from, to int) {
	if size.Height == 0 {
		return 0, rows
	}
	s.page = max(size.Height-above-1, 0)
	s.offset = max(min(s.offset, rows-s.page), 0)
	return s.offset, min(s.offset+s.page, rows)
}

// events are the lines of the view of events, the latest last. The offset counts
// from there.
func (s *State) events(now *Sample, size Size, above int) (lines []string) {
	what := strings.ToLower(s.Filter)
	for _, e := range now.Events {
		if e = clean(e); strings.Contains(strings.ToLower(e), what) {
			lines = append(lines, cut(e, limit(size)))
		}
	}
	if len(lines) == 0 {
		return []string{cut("no events", limit(size))}
	}
	slices.Reverse(lines)
	from, to := s.window(len(lines), size, above)
	lines = lines[from:to]
	slices.Reverse(lines)
	return lines
}

// foot is the last line: the keys, or the filter while it is typed.
func (s *State) foot() string {
	if s.Typing {
		return "filter: " + clean(s.Filter) + "_  (Enter keeps it, Escape takes it away)"
	}
	return "q quit  d devices  p paths  e events  s sort  r reverse  / filter  space pause"
}
