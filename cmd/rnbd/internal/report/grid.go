package report

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/fit"
)

// grid is a table in columns. The notes and the sub-tables of a row follow it,
// indented, the latter in columns of their own.
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
		o.notes(b, r)
		for k := range subs {
			o.branches(b, subs[k], r.Sub[k], k == len(subs)-1)
		}
	}
	o.sum(b, g, t)
	if left := g.leftOut(t); left != "" && !o.NoHeaders {
		for _, l := range fit.Wrap("(no room for "+left+": wide has all)", o.Width) {
			fmt.Fprintln(b, l)
		}
	}
}

const totalLabel = "Total"

// sum is the line of totals, if there are any.
func (o Options) sum(b *bytes.Buffer, g columns, t Table) {
	sum, ok := t.totals()
	if !ok || o.NoTotals {
		return
	}
	cells := o.texts(sum)
	labeled := false
	for i := range cells {
		if sum[i] != nil {
			continue
		}
		cells[i] = ""
		if g.shown[i] && !labeled && g.width[i] >= fit.Width(totalLabel) {
			cells[i], labeled = totalLabel, true
		}
	}
	g.line(b, "", cells)
}

// notes are the lines below a row about what needs attention.
func (o Options) notes(b *bytes.Buffer, r Row) {
	if !o.Screen {
		return
	}
	for _, note := range r.Notes {
		indent := "  "
		for _, l := range fit.Wrap(printable(note), max(o.Width-4, 0)) {
			fmt.Fprintln(b, indent+l)
			indent = "    "
		}
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

// branchWidth is the width of the lines before an entry of a tree.
const branchWidth = 3

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
		c.fit(o.Width, branchWidth) // what is still too wide is wrapped by the terminal
		out = append(out, c)
	}
	return out
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
		width = max(width, fit.Width(c.Header))
	}
	r := t.Rows[0]
	for i, c := range t.Columns {
		if o.NoHeaders {
			fmt.Fprintln(b, text(r.Cells[i], o.Unit))
			continue
		}
		fmt.Fprintf(b, "%-*s%s%s\n", width, c.Header, gap, text(r.Cells[i], o.Unit))
	}
	o.notes(b, r)
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
