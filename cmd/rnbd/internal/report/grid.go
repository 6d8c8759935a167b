package report

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

const gap = "  "

// grid is a table in columns. The sub-tables of a row follow it, indented, in
// columns of their own.
func (o Options) grid(b *bytes.Buffer, t Table) {
	g := o.layout(t)
	if !o.NoHeaders {
		g.widen(t)
	}
	if !g.fit(o.Width, 0) {
		o.cards(b, t)
		return
	}
	if !o.NoHeaders {
		g.header(b, t)
	}
	subs := o.subGrids(t)
	for _, r := range t.Rows {
		g.colored(o, t).line(b, "", o.texts(r.Cells))
		for k := range subs {
			o.branches(b, subs[k], r.Sub[k], k == len(subs)-1)
		}
	}
	if sum, ok := t.totals(); ok && !o.NoTotals {
		cells := o.texts(sum)
		for i := range cells {
			if sum[i] == nil {
				cells[i] = ""
			}
		}
		if sum[0] == nil {
			cells[0] = "Total"
		}
		g.line(b, "", cells)
	}
}

// branches are the lines of a row's sub-tables.
func (o Options) branches(b *bytes.Buffer, c columns, sub Table, last bool) {
	for i, r := range sub.Rows {
		branch := "├─ "
		if last && i == len(sub.Rows)-1 {
			branch = "└─ "
		}
		c.colored(o, sub).line(b, branch, o.texts(r.Cells))
	}
}

// columns are the widths of a grid, and the set of those aligned right.
type columns struct {
	width []int
	right []bool
	state int // the column that has colours; -1: none
}

// branchWidth is the width of the lines before an entry of a tree.
const branchWidth = 3

// minWidth is the smallest width of a column that fit has shortened, in runes.
const minWidth = 8

// fit shortens the widest columns until a line with lead before it has at
// most limit runes; 0 is no limit. Numbers are not shortened. It returns
// false if the line is still too long.
func (c columns) fit(limit, lead int) bool {
	for limit > 0 {
		total, widest := lead, -1
		for i, w := range c.width {
			total += w + len(gap)
			if !c.right[i] && w > minWidth && (widest < 0 || w > c.width[widest]) {
				widest = i
			}
		}
		if total -= len(gap); total <= limit || widest < 0 {
			return total <= limit
		}
		c.width[widest]--
	}
	return true
}

// widen makes room for the headers of t.
func (c columns) widen(t Table) {
	for i, col := range t.Columns {
		c.width[i] = max(c.width[i], utf8.RuneCountInString(col.Header))
	}
}

// colored is c with the colours of t's states.
func (c columns) colored(o Options, t Table) columns {
	c.state = -1
	if o.Color {
		c.state = slices.IndexFunc(t.Columns, func(i Info) bool { return i.Name == "state" })
	}
	return c
}

// paint gives a state its colour: green works, red does not, yellow is on its way.
func paint(state, padded string) string {
	color := "33"
	switch state {
	case "open", "connected", "running":
		color = "32"
	case "closed", "disconnected", "failed", "stuck", "dead":
		color = "31"
	}
	return "\x1b[" + color + "m" + padded + "\x1b[0m"
}

// cut shortens s to width runes.
func cut(s string, width int) string {
	if r := []rune(s); len(r) > width {
		return string(r[:max(0, width-1)]) + "…"
	}
	return s
}

func (o Options) layout(tables ...Table) columns {
	n := len(tables[0].Columns)
	c := columns{width: make([]int, n), right: make([]bool, n), state: -1}
	for _, t := range tables {
		rows := t.Rows
		if sum, ok := t.totals(); ok && !o.NoTotals {
			if sum[0] == nil {
				sum[0] = "Total"
			}
			rows = append(rows[:len(rows):len(rows)], Row{Cells: sum})
		}
		for _, r := range rows {
			for i, v := range r.Cells {
				c.width[i] = max(c.width[i], utf8.RuneCountInString(text(v, o.Unit)))
				c.right[i] = c.right[i] || number(v)
			}
		}
	}
	return c
}

// subGrids lays out the sub-tables of rows: alike in all rows.
func (o Options) subGrids(t Table) (out []columns) {
	if o.NoTree || len(t.Rows) == 0 {
		return nil
	}
	o.NoTotals = true
	for k := range t.Rows[0].Sub {
		var all []Table
		for _, r := range t.Rows {
			all = append(all, r.Sub[k])
		}
		c := o.layout(all...)
		c.fit(o.Width, branchWidth)
		out = append(out, c)
	}
	return out
}

func (c columns) header(b *bytes.Buffer, t Table) {
	var cells []string
	for _, col := range t.Columns {
		cells = append(cells, col.Header)
	}
	c.line(b, "", cells)
}

func (c columns) line(b *bytes.Buffer, lead string, cells []string) {
	var l strings.Builder
	l.WriteString(lead)
	for i, s := range cells {
		if i > 0 {
			l.WriteString(gap)
		}
		whole := s
		s = cut(s, c.width[i])
		pad := strings.Repeat(" ", max(0, c.width[i]-utf8.RuneCountInString(s)))
		switch {
		case c.right[i]:
			s = pad + s
		case i < len(cells)-1: // no blanks at the end of a line
			s += pad
		}
		if i == c.state {
			s = paint(whole, s)
		}
		l.WriteString(s)
	}
	b.WriteString(strings.TrimRight(l.String(), " ") + "\n")
}

func (o Options) texts(cells []any) (out []string) {
	for _, v := range cells {
		out = append(out, text(v, o.Unit))
	}
	return out
}

// cards are the rows of a table that is too wide, one below the other.
func (o Options) cards(b *bytes.Buffer, t Table) {
	for i, r := range t.Rows {
		if i > 0 {
			b.WriteByte('\n')
		}
		o.card(b, Table{Name: t.Name, Item: t.Item, Columns: t.Columns, Rows: []Row{r}})
	}
}

// card is one object: a line for each field, then its sub-tables.
func (o Options) card(b *bytes.Buffer, t Table) {
	width := 0
	for _, c := range t.Columns {
		width = max(width, utf8.RuneCountInString(c.Header))
	}
	r := t.Rows[0]
	for i, c := range t.Columns {
		if o.NoHeaders {
			fmt.Fprintln(b, text(r.Cells[i], o.Unit))
			continue
		}
		fmt.Fprintf(b, "%-*s%s%s\n", width, c.Header, gap, text(r.Cells[i], o.Unit))
	}
	if o.NoTree {
		return
	}
	for _, sub := range r.Sub {
		if len(sub.Rows) > 0 {
			b.WriteByte('\n')
			o.grid(b, sub)
		}
	}
}
