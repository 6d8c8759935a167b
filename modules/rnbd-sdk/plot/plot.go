// Package plot draws measurements as lines over a common axis: an SVG picture that
// is legible on light and on dark ground.
//
// The horizontal axis is logarithmic, with a mark at each value that a line
// has; each panel has a vertical axis of its own. Each axis has a label with its
// scale. A bar through a point shows its spread. Lines differ in colour and in the
// shape of their points, and stand a little apart. The same figure gives the same
// bytes.
package plot

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"math"
	"slices"
	"strings"
	"unicode/utf8"
)

// Figure is one picture.
type Figure struct {
	Title  string
	Notes  []string // lines below the title
	X      string   // label of the horizontal axis
	Panels []Panel
}

// Panel is one diagram.
type Panel struct {
	Y      string               // label of the vertical axis, with its unit
	Log    bool                 // logarithmic; else linear from 0
	Format func(float64) string // of the marks
	Lines  []Line
}

// Line is a series of points. Lines of the same name, color and dash in several
// panels have one entry in the legend.
type Line struct {
	Name   string
	Color  int // counted from 0; the palette begins again after Colors
	Dashed bool
	Points []Point // with X, and in a logarithmic panel Y, above 0
}

// Point is one value, with its spread. Low and High are the ends of the bar, the
// quartiles for example; both are 0 if there is none.
type Point struct{ X, Y, Low, High float64 }

// Colors is the number of colors that can be told apart.
const Colors = 8

// Sizes in pixels. A panel is the frame of a diagram without its marks.
const (
	panelWidth  = 340.0
	soleWidth   = 560.0 // of a panel without others
	panelHeight = 230.0
	left        = 78.0 // of a panel: marks and label
	right       = 22.0
	noteRow     = 18.0
	bottom      = 56.0 // marks and label
	legendRow   = 22.0
	legendItem  = 210.0 // at least
	letter      = 6.6   // of the legend, about
	apart       = 3.0   // between the points of two lines with the same value of X
)

// panelWidth returns the width of each panel.
func (f Figure) panelWidth() float64 {
	if len(f.Panels) == 1 {
		return soleWidth
	}
	return panelWidth
}

// SVG draws the figure.
func (f Figure) SVG() []byte {
	legend, wide := f.legend(), f.panelWidth()
	item := legendItem
	for _, l := range legend {
		item = max(item, 52+letter*float64(utf8.RuneCountInString(l.Name)))
	}
	width := float64(len(f.Panels)) * (left + wide + right)
	perRow := max(1, int((width-left)/item))
	rows := (len(legend) + perRow - 1) / perRow
	top := 68 + float64(len(f.Notes))*noteRow
	height := top + panelHeight + bottom + float64(rows)*legendRow
	d := &drawing{wide: wide}
	d.add(`<svg xmlns="http://www.w3.org/2000/svg" width="%g" height="%g" viewBox="0 0 %g %g" role="img">`, width, height, width, height)
	d.add(`<title>%s</title>`, escape(f.Title))
	d.WriteString(style())
	d.add(`<rect class="ground" width="%g" height="%g" rx="6"/>`, width, height)
	d.text(left, 30, "title", "start", f.Title)
	for i, n := range f.Notes {
		d.text(left, 52+float64(i)*noteRow, "faint", "start", n)
	}
	x := f.xAxis()
	for i, p := range f.Panels {
		d.panel(p, x, f.X, float64(i)*(left+wide+right)+left, top)
	}
	for i, l := range legend {
		d.entry(l, left+float64(i%perRow)*item, top+panelHeight+bottom+float64(i/perRow)*legendRow+4)
	}
	d.WriteString("</svg>\n")
	return d.Bytes()
}

// legend lists each kind of line once.
func (f Figure) legend() (out []Line) {
	for _, p := range f.Panels {
		for _, l := range p.Lines {
			if !slices.ContainsFunc(out, func(o Line) bool { return o.Name == l.Name && o.Color == l.Color && o.Dashed == l.Dashed }) {
				out = append(out, l)
			}
		}
	}
	return out
}

// xAxis has a mark at each value.
func (f Figure) xAxis() axis {
	var marks []float64
	for _, p := range f.Panels {
		for _, l := range p.Lines {
			for _, pt := range l.Points {
				marks = append(marks, pt.X)
			}
		}
	}
	slices.Sort(marks)
	marks = slices.Compact(marks)
	if len(marks) == 0 {
		return axis{log: true, low: 1, high: 2}
	}
	return axis{log: true, low: marks[0], high: marks[len(marks)-1], marks: marks}
}

// drawing is a picture in the making.
type drawing struct {
	bytes.Buffer
	wide float64 // width of a panel
}

func (d *drawing) add(format string, args ...any) { fmt.Fprintf(d, format+"\n", args...) }

func (d *drawing) text(x, y float64, class, anchor, s string) {
	d.add(`<text class="%s" x="%.1f" y="%.1f" text-anchor="%s">%s</text>`, class, x, y, anchor, escape(s))
}

// panel draws p with the upper left corner of its frame at x0 and top.
func (d *drawing) panel(p Panel, x axis, label string, x0, top float64) {
	y := p.axis()
	atX := func(v float64) float64 { return x0 + 20 + x.share(v)*(d.wide-40) }
	atY := func(v float64) float64 { return top + panelHeight - y.share(v)*panelHeight }
	for _, m := range y.marks {
		d.add(`<line class="grid" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`, x0, atY(m), x0+d.wide, atY(m))
		d.text(x0-8, atY(m)+4, "faint", "end", p.Format(m))
	}
	for _, m := range x.marks {
		d.add(`<line class="grid" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`, atX(m), top+panelHeight, atX(m), top+panelHeight+5)
		d.text(atX(m), top+panelHeight+19, "faint", "middle", fmt.Sprintf("%g", m))
	}
	d.text(x0+d.wide/2, top+panelHeight+38, "", "middle", label+", "+x.scale())
	d.text(x0, top-10, "", "start", p.Y+", "+y.scale())
	for i, l := range p.Lines {
		aside := (float64(i) - float64(len(p.Lines)-1)/2) * apart
		d.line(l, func(v float64) float64 { return atX(v) + aside }, atY, p.Format)
	}
}

// line draws the bars of l, then the line, then the points upon it.
func (d *drawing) line(l Line, atX, atY func(float64) float64, format func(float64) string) {
	var path []string
	for _, p := range l.Points {
		path = append(path, fmt.Sprintf("%.1f,%.1f", atX(p.X), atY(p.Y)))
		if p.High > 0 {
			x, low, high := atX(p.X), atY(p.Low), atY(p.High)
			d.add(`<path class="bar c%d" d="M%.1f %.1fV%.1fM%.1f %.1fh6M%.1f %.1fh6"/>`, l.Color%Colors, x, low, high, x-3, low, x-3, high)
		}
	}
	d.add(`<polyline class="%s" points="%s"/>`, l.class(), strings.Join(path, " "))
	for _, p := range l.Points {
		says := fmt.Sprintf("%s, %g: %s", l.Name, p.X, format(p.Y))
		if p.High > 0 {
			says += fmt.Sprintf(", %s to %s", format(p.Low), format(p.High))
		}
		d.add(`<path class="dot c%d" d="%s"><title>%s</title></path>`, l.Color%Colors, l.shape(atX(p.X), atY(p.Y)), escape(says))
	}
}

// shapes are outlines of points around 0,0.
var shapes = []string{
	"m-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", // circle
	"m-3.5 -3.5h7v7h-7z",                  // square
	"m0 -5l4.5 8h-9z",                     // triangle
	"m0 -5l5 5l-5 5l-5 -5z",               // diamond
}

// shape returns the outline of a point of l.
func (l Line) shape(x, y float64) string {
	return fmt.Sprintf("M%.1f %.1f%s", x, y, shapes[l.Color%len(shapes)])
}

func (l Line) class() string {
	class := fmt.Sprintf("line c%d", l.Color%Colors)
	if l.Dashed {
		class += " dash"
	}
	return class
}

// entry is a line of the legend.
func (d *drawing) entry(l Line, x, y float64) {
	d.add(`<polyline class="%s" points="%.1f,%.1f %.1f,%.1f"/>`, l.class(), x, y, x+28, y)
	d.add(`<path class="dot c%d" d="%s"/>`, l.Color%Colors, l.shape(x+14, y))
	d.text(x+36, y+4, "", "start", l.Name)
}

func escape(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a Builder takes everything
	return b.String()
}

// scale names the scale of an axis.
func (a axis) scale() string {
	if a.log {
		return "logarithmic scale"
	}
	return "linear scale"
}

// axis is a scale and its marks.
type axis struct {
	log       bool
	low, high float64
	marks     []float64
}

// share is where v is, from 0 to 1; in the middle if there is one value only.
func (a axis) share(v float64) float64 {
	if a.high == a.low {
		return 0.5
	}
	if a.log {
		return math.Log(v/a.low) / math.Log(a.high/a.low)
	}
	return (v - a.low) / (a.high - a.low)
}

// axis of a panel: its ends are marks.
func (p Panel) axis() axis {
	low, high := math.Inf(1), 0.0
	for _, l := range p.Lines {
		for _, pt := range l.Points {
			low, high = min(low, pt.Y), max(high, pt.Y, pt.High)
			if pt.High > 0 {
				low = min(low, pt.Low)
			}
		}
	}
	switch {
	case high <= 0:
		return axis{high: 1, marks: []float64{0, 1}}
	case p.Log:
		return logAxis(low, high)
	}
	return linearAxis(high)
}

// linearAxis has about five steps of 1, 2 or 5 times a power of ten.
func linearAxis(high float64) axis {
	step := roundUp(high / 5)
	a := axis{high: math.Ceil(high/step) * step}
	for i := 0.0; i*step <= a.high; i++ {
		a.marks = append(a.marks, i*step)
	}
	return a
}

// logAxis has marks at 1, 2 and 5 times the powers of ten, over more than two
// decades at the powers only.
func logAxis(low, high float64) axis {
	steps := []float64{1, 2, 5}
	if high/low > 100 {
		steps = steps[:1]
	}
	a := axis{log: true}
	for e := math.Floor(math.Log10(low)); ; e++ {
		for i, s := range steps {
			m := s * math.Pow(10, e)
			next := steps[(i+1)%len(steps)] * math.Pow(10, e)
			if i == len(steps)-1 {
				next *= 10
			}
			if next <= low {
				continue
			}
			if a.marks = append(a.marks, m); m >= high && len(a.marks) > 1 {
				a.low, a.high = a.marks[0], m
				return a
			}
		}
	}
}

// roundUp is the next of 1, 2 or 5 times a power of ten.
func roundUp(v float64) float64 {
	e := math.Pow(10, math.Floor(math.Log10(v)))
	for _, s := range []float64{1, 2, 5} {
		if v <= s*e*(1+1e-9) {
			return s * e
		}
	}
	return 10 * e
}
