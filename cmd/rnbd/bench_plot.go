package main

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/machine"
	"github.com/rnbd-go/rnbd/modules/rnbd-sdk/plot"
)

// draw writes the curves over depth to a file.
func (r *benchRun) draw(path string) error {
	if err := os.WriteFile(path, r.figure().SVG(), 0o644); err != nil {
		return fmt.Errorf("--plot: %w", err)
	}
	return nil
}

// figure has requests per second, and latency as median and 99 %.
func (r *benchRun) figure() plot.Figure {
	rates := plot.Panel{Y: "requests per second", Format: metric}
	times := plot.Panel{Y: "latency", Log: true, Format: func(v float64) string { return time.Duration(v).String() }}
	color := map[string]int{}
	for _, row := range r.rows {
		name := row.Kind()
		if row.Reads > 0 && row.Writes() {
			name += " " + row.op
		}
		if _, known := color[name]; !known {
			color[name] = len(color)
		}
		x := float64(row.Depth)
		c := color[name]
		addPoint(&rates, plot.Line{Name: name, Color: c}, row.ratePoint())
		addPoint(&times, plot.Line{Name: name, Color: c}, plot.Point{X: x, Y: row.quantile(0.5), Low: row.quantile(0.25), High: row.quantile(0.75)})
		addPoint(&times, plot.Line{Name: name + ", 99 %", Color: c, Dashed: true}, plot.Point{X: x, Y: row.quantile(0.99)})
	}
	return plot.Figure{Title: r.title(), Notes: r.notes(), X: "requests in flight, per job", Panels: []plot.Panel{rates, times}}
}

// quantile returns a quantile of the latency in nanoseconds.
func (r benchRow) quantile(q float64) float64 { return float64(r.latency.Quantile(q)) }

// ratePoint is the rate of the whole run, with the quartiles of its intervals.
func (r benchRow) ratePoint() plot.Point {
	p := plot.Point{X: float64(r.Depth), Y: float64(r.latency.Count()) / r.elapsed.Seconds()}
	if n := len(r.rates); n > 3 {
		sorted := slices.Sorted(slices.Values(r.rates))
		p.Low, p.High = sorted[n/4], sorted[n-1-n/4]
	}
	return p
}

// addPoint gives the line of that name a point, in the order of workloads.
func addPoint(p *plot.Panel, l plot.Line, pt plot.Point) {
	for i := range p.Lines {
		if p.Lines[i].Name == l.Name {
			p.Lines[i].Points = append(p.Lines[i].Points, pt)
			return
		}
	}
	l.Points = []plot.Point{pt}
	p.Lines = append(p.Lines, l)
}

// title names the devices and the way to them.
func (r *benchRun) title() string {
	var names []string
	for _, t := range r.targets {
		names = append(names, t.Name)
	}
	const most = 3
	if len(names) > most {
		names = append(names[:most], fmt.Sprintf("and %d more", len(names)-most))
	}
	t := r.targets[0]
	way := t.access
	for _, s := range append([]string{t.plugin}, t.fabric...) {
		if s != "" {
			way += ", " + s
		}
	}
	return strings.Join(names, ", ") + ": " + way
}

// notes returns the conditions of the measurement.
func (r *benchRun) notes() []string {
	return []string{
		fmt.Sprintf("%s, %d cores, %s", machine.CPU(), runtime.NumCPU(), machine.Kernel()),
		"bars: quartiles, of the rate in intervals of 200 ms and of the latency of requests",
		fmt.Sprintf("load average %.2f before, %.2f after, rnbd %s, %s", r.loadBefore, r.loadAfter, versionString(), r.start.UTC().Format(time.DateOnly)),
	}
}

// metric is a number with the prefix that suits it.
func metric(v float64) string {
	for _, unit := range []struct {
		size float64
		name string
	}{{1e9, "G"}, {1e6, "M"}, {1e3, "k"}} {
		if v >= unit.size {
			return fmt.Sprintf("%.3g%s", v/unit.size, unit.name)
		}
	}
	return fmt.Sprintf("%.3g", v)
}
