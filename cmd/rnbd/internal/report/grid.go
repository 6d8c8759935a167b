package report

import (
	"bytes"
	"fmt"
	"strings"
	"unicode/utf8"
)

const gap = "  "

// grid is a table in columns. What belongs to a row follows it, indented, in
// columns of its own.
func (o Options) grid(b *bytes.Buffer, t Table) {
	g := o.layout(t)
	if !o.NoHeaders {
		g.header(b, t)
	}
	subs := o.subGrids(t)
	for _, r := range t.Rows {
		g.line(b, "", o.texts(r.Cells))
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

// branches are the lines of what belongs to a row.
func (o Options) branches(b *bytes.Buffer, c columns, sub Table, last bool) {
	for i, r := range sub.Rows {
		branch := "├─ "
		if last && i == len(sub.Rows)-1 {
			branch = "└─ "
		}
		c.line(b, branch, o.texts(r.Cells))
	}
}

// columns are the widths of a grid, and which of them are aligned right.
type columns struct {
	width []int
	right []bool
}

func (o Options) layout(tables ...Table) columns {
	n := len(tables[0].Columns)
	c := columns{width: make([]int, n), right: make([]bool, n)}
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

// subGrids lays out what belongs to rows: alike in all rows.
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
		out = append(out, o.layout(all...))
	}
	return out
}

func (c columns) header(b *bytes.Buffer, t Table) {
	var cells []string
	for i, col := range t.Columns {
		cells = append(cells, col.Header)
		c.width[i] = max(c.width[i], utf8.RuneCountInString(col.Header))
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
		pad := strings.Repeat(" ", max(0, c.width[i]-utf8.RuneCountInString(s)))
		if c.right[i] {
			l.WriteString(pad + s)
		} else {
			l.WriteString(s + pad)
		}
	}
	b.WriteString(strings.TrimRight(l.String(), " ") + "\n")
}

func (o Options) texts(cells []any) (out []string) {
	for _, v := range cells {
		out = append(out, text(v, o.Unit))
	}
	return out
}

// card is one object: a line for each field, then what belongs to it.
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
