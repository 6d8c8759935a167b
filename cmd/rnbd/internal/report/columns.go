package report

import (
	"bytes"
	"slices"
	"strings"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/fit"
)

const gap = "  "

// columns are those of a grid.
type columns struct {
	info   []Info
	width  []int
	right  []bool              // aligned right: numbers
	shown  []bool              // the others have no room
	values [][]string          // of names
	short  []map[string]string // of names that are wider than their column
	state  int                 // the column that has colours; -1: none
}

// layout returns the columns of tables of one kind, wide enough for all values.
func (o Options) layout(tables ...Table) columns {
	n := len(tables[0].Columns)
	c := columns{info: tables[0].Columns, width: make([]int, n), right: make([]bool, n), shown: make([]bool, n),
		values: make([][]string, n), short: make([]map[string]string, n), state: -1}
	for i := range c.shown {
		c.shown[i] = true
	}
	for _, t := range tables {
		rows := t.Rows
		if sum, ok := t.totals(); ok && !o.NoTotals {
			rows = append(rows[:len(rows):len(rows)], Row{Cells: sum})
			if sum[0] == nil {
				c.width[0] = fit.Width(totalLabel)
			}
		}
		for _, r := range rows {
			for i, v := range r.Cells {
				s := text(v, o.Unit)
				c.width[i] = max(c.width[i], fit.Width(s))
				c.right[i] = c.right[i] || number(v)
				if c.info[i].Kind == Name {
					c.values[i] = append(c.values[i], s)
				}
			}
		}
	}
	return c
}

// widen makes room for the headers of t.
func (c columns) widen(t Table) {
	for i, col := range t.Columns {
		c.width[i] = max(c.width[i], fit.Width(col.Header))
	}
}

// Widths to which names and texts are shortened: before columns are left out, and where no
// more can be.
const (
	someWidth  = 16
	leastWidth = 8
)

// fit makes a line with lead columns before it fit limit columns; 0 is no limit. Names and
// texts are shortened, then columns are left out. It returns false if the line is still too
// long.
func (c columns) fit(limit, lead int) bool {
	if limit <= 0 {
		return true
	}
	limit -= lead
	lower := c.lower(someWidth)
	for c.total(lower) > limit {
		if !c.leaveOut() {
			if lower = c.lower(leastWidth); c.total(lower) > limit {
				return false
			}
		}
	}
	c.takeBack(lower, limit)
	c.shrink(lower, limit)
	return true
}

// lower returns the widths to which columns may be shortened: least, and as many as names
// need to stay different.
func (c columns) lower(least int) []int {
	lower := slices.Clone(c.width)
	for i, w := range c.width {
		switch kind := c.info[i].Kind; {
		case c.right[i]:
		case kind == Name:
			lower[i] = fit.Distinct(c.values[i], min(least, w), w)
		case kind == Text:
			lower[i] = min(least, w)
		}
	}
	return lower
}

// total is the length of a line with columns of some widths.
func (c columns) total(width []int) int {
	sum := -len(gap)
	for i, w := range width {
		if c.shown[i] {
			sum += w + len(gap)
		}
	}
	return sum
}

// shrink makes the shown columns fit limit, the widest first.
func (c columns) shrink(lower []int, limit int) {
	for total := c.total(c.width); total > limit; total-- {
		widest := -1
		for i, w := range c.width {
			if c.shown[i] && w > lower[i] && (widest < 0 || w > c.width[widest]) {
				widest = i
			}
		}
		c.width[widest]--
	}
	for i, values := range c.values {
		c.short[i] = map[string]string{}
		for k, s := range fit.Names(values, c.width[i]) {
			c.short[i][values[k]] = s
		}
	}
}

// takeBack shows columns that were left out before a wider one and have room without it.
func (c columns) takeBack(lower []int, limit int) {
	for {
		best := -1
		for i, col := range c.info {
			if !c.shown[i] && c.total(lower)+len(gap)+lower[i] <= limit && (best < 0 || col.Rank < c.info[best].Rank) {
				best = i
			}
		}
		if best < 0 {
			return
		}
		c.shown[best] = true
	}
}

// leaveOut leaves out the column of the highest rank. It returns false if none is left
// that may be.
func (c columns) leaveOut() bool {
	worst := -1
	for i, col := range c.info {
		if c.shown[i] && col.Rank > 0 && (worst < 0 || col.Rank > c.info[worst].Rank) {
			worst = i
		}
	}
	if worst >= 0 {
		c.shown[worst] = false
	}
	return worst >= 0
}

// leftOut names the columns that have no room.
func (c columns) leftOut(t Table) string {
	var names []string
	for i, col := range t.Columns {
		if !c.shown[i] {
			names = append(names, col.Header)
		}
	}
	return strings.Join(names, ", ")
}

func (c columns) header(b *bytes.Buffer, t Table) {
	var cells []string
	for i, col := range t.Columns {
		cells = append(cells, fit.End(col.Header, c.width[i]))
	}
	c.line(b, "", cells)
}

// line writes the cells of the shown columns.
func (c columns) line(b *bytes.Buffer, lead string, cells []string) {
	var l strings.Builder
	l.WriteString(lead)
	first := true
	last := len(c.shown) - 1
	for last > 0 && !c.shown[last] {
		last--
	}
	for i, s := range cells {
		if !c.shown[i] {
			continue
		}
		if !first {
			l.WriteString(gap)
		}
		first = false
		whole := s
		if short, ok := c.short[i][s]; ok {
			s = short
		} else if c.info[i].Kind != Exact {
			s = fit.End(s, c.width[i])
		}
		pad := strings.Repeat(" ", max(0, c.width[i]-fit.Width(s)))
		switch {
		case c.right[i]:
			s = pad + s
		case i < last: // no blanks at the end of a line
			s += pad
		}
		if i == c.state {
			s = paint(whole, s)
		}
		l.WriteString(s)
	}
	b.WriteString(strings.TrimRight(l.String(), " ") + "\n")
}
