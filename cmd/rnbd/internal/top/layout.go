package top

import (
	"slices"
	"strings"

	"github.com/rnbd-go/rnbd/cmd/rnbd/internal/fit"
)

// placed is a column on the screen.
type placed struct {
	*column
	at    int // index in the grid
	width int
}

// layout chooses the columns for a screen of limit columns, and their widths; 0: no
// limit. The column that is sorted by is kept as long as the first.
func (g *grid) layout(limit int, sorted string) (out []placed) {
	for i := range g.columns {
		if g.columns[i].rank < hidden {
			out = append(out, placed{&g.columns[i], i, g.least(i, limit)})
		}
	}
	for limit > 0 && len(out) > 1 && total(out) > limit {
		worst := 0
		for i := range out {
			if i > 0 && out[i].name != sorted && (worst == 0 || out[i].rank > out[worst].rank) {
				worst = i
			}
		}
		if worst == 0 { // the first and the one that is sorted by
			worst = 1
		}
		out = slices.Delete(out, worst, worst+1)
	}
	rest := long
	if limit > 0 {
		rest = limit - total(out)
		if rest < 0 {
			out[0].width = limit
		}
	}
	for i := range out {
		if more := min(g.wanted(out[i])-out[i].width, rest); more > 0 {
			out[i].width += more
			rest -= more
		}
	}
	return out
}

// least is the smallest width of column i on a screen of limit columns. Names of objects
// stay different as long as they leave half of the screen to the rest.
func (g *grid) least(i, limit int) int {
	c := &g.columns[i]
	switch {
	case c.whole:
		return g.wanted(placed{c, i, c.min})
	case i == 0 && limit > 0:
		return fit.Distinct(g.texts(i), c.min, max(c.min, limit/2))
	}
	return c.min
}

// texts are those of column i.
func (g *grid) texts(i int) []string {
	out := make([]string, len(g.rows))
	for k := range g.rows {
		out[k] = g.rows[k].cells[i].text
	}
	return out
}

// shorten makes names fit the columns that were chosen.
func (g *grid) shorten(all []placed) {
	for _, p := range all {
		if !p.flexible() || p.whole {
			continue
		}
		for k, name := range fit.Names(g.texts(p.at), p.width) {
			g.rows[k].cells[p.at].text = name
		}
	}
}

func total(all []placed) (n int) {
	for _, p := range all {
		n += p.width + 1
	}
	return n - 1
}

// wanted is the width that shows a column whole, as far as it may grow.
func (g *grid) wanted(p placed) int {
	if !p.flexible() {
		return p.width
	}
	most := size(p.head)
	for _, r := range g.rows {
		most = max(most, size(r.cells[p.at].text))
	}
	return min(most, p.max)
}

// heads are the lines above the rows: stages, if there are any, and the columns.
func heads(all []placed) (lines []string) {
	var groups, names []string
	grouped := false
	for i, p := range all {
		names = append(names, pad(cut(p.head, p.width), p.width, !p.flexible()))
		label := ""
		if i+1 == len(all) || all[i+1].group != p.group { // the last of its stage
			label = p.group
		}
		groups = append(groups, pad(label, p.width, true))
		grouped = grouped || label != ""
	}
	if grouped {
		lines = append(lines, strings.TrimRight(strings.Join(groups, " "), " "))
	}
	return append(lines, strings.TrimRight(strings.Join(names, " "), " "))
}

// line writes a row. With colour, states and alarms have some.
func (r *row) line(all []placed, color bool) string {
	var b strings.Builder
	blanks := 0
	for i, p := range all {
		if i > 0 {
			blanks++
		}
		text := cut(r.cells[p.at].text, p.width)
		if text == "" {
			blanks += p.width
			continue
		}
		fill := p.width - size(text)
		if !p.flexible() {
			blanks, fill = blanks+fill, 0
		}
		b.WriteString(strings.Repeat(" ", blanks))
		switch {
		case color && p.name == "state":
			text = paint(stateColor(r.cells[p.at].text), text)
		case color && r.alarm[p.at]:
			text = paint(red, text)
		}
		b.WriteString(text)
		blanks = fill // none behind the last
	}
	return b.String()
}

// Colours, as parameters of SGR.
const (
	red    = "31"
	green  = "32"
	yellow = "33"
)

func paint(color, s string) string { return "\x1b[" + color + "m" + s + "\x1b[0m" }

// stateColor returns green for good states, red for bad ones, yellow for the rest.
func stateColor(state string) string {
	word, _, _ := strings.Cut(state, ":")
	switch word {
	case "open", "connected":
		return green
	case "closed", "disconnected", "failed", "stuck", "dead":
		return red
	}
	return yellow
}
