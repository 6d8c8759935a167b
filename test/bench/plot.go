package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
)

// plot is a picture of a figure over depth, a line for each target.
type plot struct {
	file, title, unit string
	lines             []line
}

type line struct {
	name   string
	points []point
}

// point is the median of a target at a depth, with its lower and upper quartile.
type point struct{ depth, value, low, high float64 }

// plots returns the plots with figures of every depth.
func (p *report) plots() (all []plot) {
	for _, write := range []bool{false, true} {
		for _, m := range []metric{kiops, mean} {
			name := "4k-rand" + verb(write)
			pl := plot{file: name + "-iops.svg", title: "4 KiB random " + verb(write) + ", throughput", unit: m.unit}
			if m.lower {
				pl.file, pl.title = name+"-latency.svg", "4 KiB random "+verb(write)+", mean latency"
			}
			for _, target := range curveOf {
				if l := p.line(target, m, write); len(l.points) == len(curve) {
					pl.lines = append(pl.lines, l)
				}
			}
			if len(pl.lines) > 0 {
				all = append(all, pl)
			}
		}
	}
	return all
}

// line returns the points of a target, one for each depth with figures.
func (p *report) line(target string, m metric, write bool) line {
	l := line{name: target}
	for _, depth := range curve {
		w := random(write, depth, 1)
		i := slices.IndexFunc(p.Series, func(s series) bool { return s.Target == target && s.Workload == w.Name })
		if i < 0 {
			continue
		}
		r := results{samples: map[key][]*sample{{}: p.Series[i].Samples}}
		if v := r.figures(key{}, m); quantile(v, 0) > 0 {
			l.points = append(l.points, point{float64(depth), quantile(v, 0.5), quantile(v, 0.25), quantile(v, 0.75)})
		}
	}
	return l
}

// The picture, in pixels. Both axes are logarithmic: targets differ by orders
// of magnitude.
const (
	plotWidth, plotHeight                    = 880, 420
	plotLeft, plotRight, plotTop, plotBottom = 80, 340, 40, 80
)

// colours that stay apart for the colour-blind (Okabe and Ito).
var colours = []string{"#d55e00", "#cc79a7", "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#000000", "#999999"}

func (pl plot) svg() []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", plotWidth, plotHeight)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#ffffff"/>`+"\n", plotWidth, plotHeight)
	fmt.Fprintf(&b, `<text x="%d" y="22" font-size="15">%s</text>`+"\n", plotLeft, html.EscapeString(pl.title))
	low, high := pl.bounds()
	y := func(v float64) float64 {
		return plotHeight - plotBottom - math.Log(v/low)/math.Log(high/low)*(plotHeight-plotBottom-plotTop)
	}
	x := func(depth float64) float64 {
		return plotLeft + math.Log(depth/float64(curve[0]))/math.Log(float64(curve[len(curve)-1])/float64(curve[0]))*(plotWidth-plotLeft-plotRight)
	}
	pl.axes(&b, x, y, low, high)
	for i, l := range pl.lines {
		l.draw(&b, x, y, colours[i%len(colours)], plotTop+10+20*i)
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

// bounds are the powers of ten around all values.
func (pl plot) bounds() (low, high float64) {
	low, high = math.Inf(1), 0
	for _, l := range pl.lines {
		for _, p := range l.points {
			low, high = min(low, p.low), max(high, p.high)
		}
	}
	low, high = math.Pow(10, math.Floor(math.Log10(low))), math.Pow(10, math.Ceil(math.Log10(high)))
	return low, max(high, 10*low)
}

func (pl plot) axes(b *bytes.Buffer, x, y func(float64) float64, low, high float64) {
	right := float64(plotWidth - plotRight)
	for decade := low; decade < high*1.01; decade *= 10 {
		for _, k := range []float64{1, 2, 5} {
			if v := decade * k; v <= high*1.01 {
				fmt.Fprintf(b, `<path d="M%d %.1fH%.1f" stroke="#dddddd"/><text x="%d" y="%.1f" text-anchor="end">%g</text>`+"\n",
					plotLeft, y(v), right, plotLeft-6, y(v)+4, v)
			}
		}
	}
	middle := (plotTop + plotHeight - plotBottom) / 2
	fmt.Fprintf(b, `<text x="20" y="%d" transform="rotate(-90 20 %d)" text-anchor="middle">%s, logarithmic scale</text>`+"\n", middle, middle, pl.unit)
	fmt.Fprintf(b, `<text x="%.1f" y="%d" text-anchor="middle">requests in flight, logarithmic scale</text>`+"\n", (plotLeft+right)/2, plotHeight-plotBottom+40)
	fmt.Fprintf(b, `<text x="%d" y="%d" fill="#666666">Points are medians of the rounds, bars go from the lower to the upper quartile.</text>`+"\n", plotLeft, plotHeight-plotBottom+64)
	for _, depth := range curve {
		fmt.Fprintf(b, `<path d="M%.1f %dV%d" stroke="#dddddd"/><text x="%.1f" y="%d" text-anchor="middle">%d</text>`+"\n",
			x(float64(depth)), plotTop, plotHeight-plotBottom, x(float64(depth)), plotHeight-plotBottom+18, depth)
	}
}

// draw draws the line and its entry in the legend.
func (l line) draw(b *bytes.Buffer, x, y func(float64) float64, colour string, legend int) {
	fmt.Fprintf(b, `<polyline fill="none" stroke="%s" stroke-width="2" points="`, colour)
	for _, p := range l.points {
		fmt.Fprintf(b, "%.1f,%.1f ", x(p.depth), y(p.value))
	}
	b.WriteString(`"/>` + "\n")
	for _, p := range l.points {
		fmt.Fprintf(b, `<path d="M%.1f %.1fV%.1f" stroke="%s"/>`+"\n", x(p.depth), y(p.low), y(p.high), colour)
		fmt.Fprintf(b, `<circle cx="%.1f" cy="%.1f" r="3" fill="%s"><title>%s, depth %g: %s, quartiles %s and %s</title></circle>`+"\n",
			x(p.depth), y(p.value), colour, html.EscapeString(l.name), p.depth, digits(p.value), digits(p.low), digits(p.high))
	}
	at := plotWidth - plotRight + 20
	fmt.Fprintf(b, `<path d="M%d %dh18" stroke="%s" stroke-width="2"/><text x="%d" y="%d">%s</text>`+"\n",
		at, legend, colour, at+24, legend+4, html.EscapeString(l.name))
}
