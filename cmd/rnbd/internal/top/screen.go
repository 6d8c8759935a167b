package top

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/fit"
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
	lines, counts := s.summary(now, sum, every, size)
	foot := ""
	if size.Height > 0 {
		foot = s.foot()
	}
	if g == nil {
		lines = append(lines, s.events(now, size, len(lines))...)
	} else {
		if len(now.Daemons) == 1 {
			g.without("daemon")
		} else {
			g.separateDaemons()
		}
		lines = s.table(g, lines, counts, size)
	}
	return frame(lines, foot, size)
}

// frame brings lines to the size, with foot in the last one.
func frame(lines []string, foot string, to Size) []string {
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

// summary are the lines above the view: the time, what needs attention, sums, and daemons
// that do not answer. counts is the index of the line that counts objects.
func (s *State) summary(now *Sample, sum totals, every time.Duration, size Size) (lines []string, counts int) {
	var kinds, errs, things []string
	for _, d := range now.Daemons {
		kinds = append(kinds, d.Kind)
		for _, c := range d.Conditions {
			if thing := clean(strings.TrimSpace(c.Kind + " " + c.Subject)); !slices.Contains(things, thing) {
				things = append(things, thing)
			}
		}
		if d.Err != "" {
			errs = append(errs, "the "+d.Kind+" daemon does not answer: "+clean(d.Err))
		}
	}
	first := []string{"rnbd top " + now.Time.UTC().Format("2006-01-02T15:04:05Z"), strings.Join(kinds, " and "), fmt.Sprintf("every %s", every)}
	if s.Paused {
		first = append(first, "paused")
	}
	up := 0
	for i := range now.Paths {
		if now.Paths[i].State == "connected" {
			up++
		}
	}
	second := []string{sum.iops.number() + " IOPS", "read " + sum.read.bytes() + "/s", "write " + sum.written.bytes() + "/s",
		fmt.Sprintf("failed %d", sum.failed), fmt.Sprintf("hung %d", sum.hung)}
	third := []string{plural(len(now.Devices), "device"), fmt.Sprintf("%d of %d paths connected", up, len(now.Paths))}
	if o, ok := s.sort[s.View]; ok {
		by := "by " + o.column
		if o.reversed {
			by += " reversed"
		}
		third = append(third, by)
	}
	if s.Filter != "" && !s.Typing {
		third = append(third, "filter "+clean(s.Filter))
	}
	lines = append(lines, fit.Join(first, partGap, limit(size)))
	if len(things) > 0 {
		lines = append(lines, alarm(fit.Verdict(things, limit(size)), size))
	}
	counts = len(lines) + 1
	lines = append(lines, fit.Join(second, partGap, limit(size)), fit.Join(third, partGap, limit(size)))
	for _, e := range errs {
		lines = append(lines, alarm(cut(e, limit(size)), size))
	}
	return append(lines, ""), counts
}

// partGap is between the parts of a line.
const partGap = "  "

// alarm has a line stand out.
func alarm(line string, size Size) string {
	if size.Color {
		return paint(red, line)
	}
	return line
}

func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// table adds the rows that fit to lines, and says which these are in the line counts.
func (s *State) table(g *grid, lines []string, counts int, size Size) []string {
	all := len(g.rows)
	g.filter(s.Filter)
	by := s.sort[s.View]
	g.sort(by)
	columns := g.layout(size.Width, by.column)
	g.shorten(columns)
	above := heads(columns)
	for k := range above {
		above[k] = cut(above[k], limit(size))
	}
	below := make([][]string, len(g.rows))
	for k := range g.rows {
		below[k] = g.rows[k].below(size)
	}
	from, to := s.window(len(g.rows), size, len(lines)+len(above), func(k int) int { return 1 + len(below[k]) })
	switch {
	case all == 0:
		above = []string{cut("no "+s.View, limit(size))}
	case len(g.rows) == 0:
		above = []string{cut("no "+strings.TrimSuffix(s.View, "s")+" fits the filter", limit(size))}
	}
	if to-from < len(g.rows) {
		lines[counts] = fit.Join([]string{lines[counts], fmt.Sprintf("rows %d-%d of %d", from+1, to, len(g.rows))}, partGap, limit(size))
	}
	lines = append(lines, above...)
	for k := from; k < to; k++ {
		lines = append(append(lines, g.rows[k].line(columns, size.Color)), below[k]...)
	}
	return lines
}

// maxBelow bounds the lines below a row.
const maxBelow = 3

// below are the lines below a row: what of it needs attention.
func (r *row) below(size Size) (lines []string) {
	for _, why := range r.why {
		if len(lines) == maxBelow {
			break
		}
		for k, l := range fit.Wrap(why, max(limit(size)-4, 0)) {
			indent := "  "
			if k > 0 {
				indent = "    "
			}
			lines = append(lines, alarm(cut(indent+l, limit(size)), size))
		}
	}
	return lines[:min(len(lines), maxBelow)]
}

// window returns the rows on the screen below some lines; height returns the lines that a
// row takes.
func (s *State) window(rows int, size Size, above int, height func(int) int) (from, to int) {
	if size.Height == 0 {
		return 0, rows
	}
	room := max(size.Height-above-1, 0)
	last, left := rows, room
	for last > 0 && height(last-1) <= left {
		left -= height(last - 1)
		last--
	}
	if room > 0 { // a part of the last row, at least
		last = min(last, rows-1)
	}
	s.offset = max(min(s.offset, last), 0)
	from, to, left = s.offset, s.offset, room
	for to < rows && left > 0 && (height(to) <= left || to == from) {
		left -= height(to)
		to++
	}
	s.page = to - from
	return from, to
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
	from, to := s.window(len(lines), size, above, func(int) int { return 1 })
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
