package main

import (
	"slices"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plot"
)

// picture is a figure over depth, with a line for each target, and the name of its
// file.
type picture struct {
	file string
	plot.Figure
}

// pictures returns the figures with results of every depth.
func (p *report) pictures() (all []picture) {
	for _, write := range []bool{false, true} {
		for _, m := range []metric{kiops, mean} {
			pic := picture{file: "4k-rand" + verb(write) + "-iops.svg"}
			what := ", throughput"
			if m.lower {
				pic.file, what = "4k-rand"+verb(write)+"-latency.svg", ", mean latency"
			}
			panel := plot.Panel{Y: m.unit, Log: true, Format: digits}
			for i, target := range curveOf {
				if l := p.line(target, m, write); len(l.Points) == len(curve) {
					l.Color = i
					panel.Lines = append(panel.Lines, l)
				}
			}
			pic.Figure = plot.Figure{Title: "4 KiB random " + verb(write) + what, X: "requests in flight", Panels: []plot.Panel{panel},
				Notes: []string{"points: medians of the rounds; bars: lower and upper quartile"}}
			if len(panel.Lines) > 0 {
				all = append(all, pic)
			}
		}
	}
	return all
}

// line returns the points of a target, one for each depth with figures: the median
// with the quartiles.
func (p *report) line(target string, m metric, write bool) plot.Line {
	l := plot.Line{Name: target}
	for _, depth := range curve {
		w := random(write, depth, 1)
		i := slices.IndexFunc(p.Series, func(s series) bool { return s.Target == target && s.Workload == w.Name })
		if i < 0 {
			continue
		}
		r := results{samples: map[key][]*sample{{}: p.Series[i].Samples}}
		if v := r.figures(key{}, m); quantile(v, 0) > 0 {
			l.Points = append(l.Points, plot.Point{X: float64(depth), Y: quantile(v, 0.5), Low: quantile(v, 0.25), High: quantile(v, 0.75)})
		}
	}
	return l
}
